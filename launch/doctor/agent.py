"""The process that the doctor runs on each machine: it answers one JSON request per line until its input ends.

Uses only the standard library, because its source is sent to machines that may not have Mantissa.
"""

from __future__ import annotations

import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from launch.doctor.facts import AS_TEXT, collect, nearest_existing


def serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    """Answer each line of `requests` with {"result": ...} or {"error": text}."""
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        result: Any = None
        try:
            if request["do"] == "time":
                result = time.time()
            elif request["do"] == "facts":
                result = collect(request)
            elif request["do"] == "listen":
                listener = socket.create_server(("", 0))  # listens until this process ends
                result = listener.getsockname()[1]
            elif request["do"] == "reach":
                result = {name: connection_error(name, port) for name, port in request["ports"].items()}
            elif request["do"] == "mark":  # a file for other machines to find
                (nearest_existing(request["folder"]) / request["name"]).touch()
            elif request["do"] == "unmark":
                (nearest_existing(request["folder"]) / request["name"]).unlink()
            elif request["do"] == "run":
                result = run(request, requests)
            answers.write(json.dumps({"result": result}).encode() + b"\n")
        except Exception as error:
            answers.write(json.dumps({"error": f"{type(error).__name__}: {error}"}).encode() + b"\n")
        answers.flush()


def connection_error(name: str, port: int) -> str | None:
    """Why connecting to `port` of `name` fails; None if it succeeds or the name does not resolve."""
    try:
        socket.create_connection((name, port), timeout=5).close()
    except socket.gaierror:
        return None
    except OSError as error:
        return error.strerror or str(error)
    return None


def run(request: dict[str, Any], requests: IO[bytes]) -> dict[str, Any]:
    """Run a Python program, given as text, with this Python, preceded by `launcher`.

    The result has `answer`, the JSON that the program printed after "DOCTOR ", its exit `code`, whether it was `late`,
    and its last lines as `output`. It is ended after `limit` seconds, or once the requester closes `requests`.
    """
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        script = Path(folder) / "program.py"
        script.write_text(request["program"], encoding="utf-8")
        own = str(Path(sys.executable).parent)
        environment = {**os.environ, "PATH": os.pathsep.join([own, os.environ.get("PATH", "")])}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [request["cwd"], environment.get("PYTHONPATH")]))
        environment.setdefault("OMP_NUM_THREADS", "1")
        command = [sys.executable, *request["launcher"], str(script), json.dumps(request["given"])]
        cwd = request["cwd"] if Path(request["cwd"]).is_dir() else None
        process = subprocess.Popen(command, env=environment, cwd=cwd, start_new_session=True, **AS_TEXT)
        output, late = _wait(process, request["limit"], requests)
    lines = [line for line in output.splitlines() if line.strip()]
    answer = next((json.loads(line[7:]) for line in reversed(lines) if line.startswith("DOCTOR ")), None)
    return {"answer": answer, "code": process.returncode, "late": late, "output": lines[-200:]}


def _wait(process: subprocess.Popen[str], limit: float, requests: IO[bytes]) -> tuple[str, bool]:
    """(the program's output, whether it had to be ended)."""
    ends = time.monotonic() + limit
    while time.monotonic() < ends and not select.select([requests], [], [], 0)[0]:
        with suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=0.5)[0], False
    process.terminate()  # torchrun then ends its workers, which have their own sessions
    try:
        return process.communicate(timeout=10)[0], True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return process.communicate()[0], True


def bootstrap(python: str) -> str:
    """Shell command that starts an agent, whose source arrives as the first line of its input."""
    program = (
        "import sys, os, json, types\n"
        "environment, sources = json.loads(sys.stdin.buffer.readline())\n"
        "os.environ.update(environment)\n"
        "for name, text in sources:\n"
        "    sys.modules[name] = types.ModuleType(name)\n"
        "    package, _, module = name.rpartition('.')\n"
        "    if package:\n"
        "        setattr(sys.modules[package], module, sys.modules[name])\n"
        "    exec(compile(text, name, 'exec'), sys.modules[name].__dict__)\n"
        "sys.modules['launch.doctor.agent'].serve(sys.stdin.buffer, sys.stdout.buffer)\n"
    )
    return shlex.join([python, "-c", program])
