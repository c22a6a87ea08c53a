"""The machines of a job, and the agent process on each of them, over ssh or local."""

import json
import os
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from launch.doctor.agent import bootstrap

HERE = "localhost"
_SENT_MODULES = (
    *("config", "config.machine", "config.machine.processes", "config.machine.op_builds"),
    *("launch", "launch.doctor", "launch.doctor.facts", "launch.doctor.agent"),
)
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10")
_EXPORTED_PREFIXES = ("NCCL", "PYTHON", "UCX", "MLFLOW", "MV2")
"""Prefixes of variables that the deepspeed launcher exports to other machines; .deepspeed_env adds others."""


class Unreachable(Exception):
    """The machine did not answer; the message says why."""


@dataclass
class Host:
    """One machine, and the agent on it while connected."""

    name: str
    slots: int | None = None
    """Number of processes in the hostfile; None without a hostfile."""
    local: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _lines: queue.Queue[bytes] = field(default_factory=queue.Queue)
    _stderr: IO[bytes] = field(default_factory=TemporaryFile)

    def connect(self, ssh: Sequence[str]) -> None:
        """Start the agent. Raises Unreachable if ssh fails or the machine lacks this Python."""
        shell = bootstrap(sys.executable)
        command = ["/bin/sh", "-c", f"exec {shell}"] if self.local else [*ssh, *_SSH_OPTIONS, self.name, _remote(shell)]
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, start_new_session=True
            )
        except OSError as error:
            raise Unreachable(f"cannot start {command[0]}: {error.strerror}") from error
        threading.Thread(target=self._read_stdout, args=(self._process,), daemon=True).start()
        top = Path(__file__).parents[2]
        files = {name: top / f"{name.replace('.', '/')}.py" for name in _SENT_MODULES}
        sources = [[name, file.read_text(encoding="utf-8") if file.is_file() else ""] for name, file in files.items()]
        self._write(json.dumps([{} if self.local else _environment(), sources]))
        self.ask("time", 30.0)

    def ask(self, do: str, seconds: float, **given: Any) -> Any:
        """Send one request and return its result. Raises Unreachable."""
        self._write(json.dumps({"do": do, **given}))
        ends = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                self.close()
                raise Unreachable(f"no answer within {seconds:.0f} s") from None
            if not line:
                raise Unreachable(self._exit_reason())
            if line.startswith((b'{"result"', b'{"error"')):  # other lines come from a login shell
                break
        answer = json.loads(line)
        if "error" in answer:
            raise Unreachable(answer["error"])
        return answer["result"]

    def run(self, program: str, given: dict[str, Any], *, seconds: float, launcher: Sequence[str] = ()) -> Any:
        """Run a Python program there, within `seconds`, and return its result (`agent.run`). Raises Unreachable."""
        request = {"program": program, "given": given, "launcher": launcher, "limit": seconds, "cwd": str(Path.cwd())}
        return self.ask("run", seconds + 30, **request)

    def clock(self) -> tuple[float, float]:
        """[seconds] (how far its clock is ahead of ours, error of this measurement), from the best of five tries."""
        tries = []
        for _ in range(5):
            before = time.time()
            remote = self.ask("time", 10.0)
            after = time.time()
            tries.append(((after - before) / 2, remote - (before + after) / 2))
        error, ahead = min(tries)
        return ahead, error

    def close(self) -> None:
        if self._process is not None:
            with suppress(OSError):
                assert self._process.stdin is not None
                self._process.stdin.close()
            try:
                self._process.wait(timeout=2)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    def _write(self, text: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(text.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise Unreachable(self._exit_reason()) from None

    def _exit_reason(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        last = lines[-1].strip()[:300] if lines else "no output"
        if self._process.returncode == 127:
            return f"it has no {sys.executable}: {last}"
        return f"{last} (exit code {self._process.returncode})"

    def _read_stdout(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in iter(process.stdout.readline, b""):
            self._lines.put(line)
        self._lines.put(b"")


def on_all(hosts: Sequence[Host], do: Callable[[Host], Any]) -> dict[str, Any]:
    """Call `do` on every host in parallel; returns host name to its result, or to the Unreachable that it raised."""

    def one(host: Host) -> Any:
        try:
            return do(host)
        except Unreachable as error:
            return error

    with ThreadPoolExecutor(max(1, len(hosts))) as pool:  # one thread each: they may wait for each other
        try:
            return dict(zip([host.name for host in hosts], pool.map(one, hosts), strict=True))
        except BaseException as error:
            for host in hosts:  # otherwise Ctrl-C would wait for their answers
                host.close()
            if isinstance(error, RuntimeError):  # no further thread can be started
                return {host.name: Unreachable(str(error)) for host in hosts}
            raise


def _environment() -> dict[str, str]:
    """Variables that the deepspeed launcher sets for a rank on another machine."""
    exports = {name: value for name, value in os.environ.items() if name.startswith(_EXPORTED_PREFIXES)}
    for folder in (Path.home(), Path()):
        file = folder / os.environ.get("DS_ENV_FILE", ".deepspeed_env")
        if file.is_file():
            lines = file.read_text(encoding="utf-8").splitlines()
            exports |= {name.strip(): value.strip() for name, _, value in (line.partition("=") for line in lines) if _}
    return exports


def _remote(command: str) -> str:
    """The command as the deepspeed launcher would start a rank, in the same folder; secrets travel with the source."""
    needed = {name: value for name, value in _environment().items() if name.startswith("PYTHON")}
    settings = "".join(f"export {name}={shlex.quote(value)}; " for name, value in needed.items())
    return f"{settings}cd {shlex.quote(str(Path.cwd()))} 2>/dev/null; exec {command}"
