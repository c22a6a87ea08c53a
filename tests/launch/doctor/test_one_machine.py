"""The doctor on this machine: each fault is planted for real, and found and named by a real run."""

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.machine.processes import free_port
from tests.support.jobs.launches import BIN, wait_until

pytestmark = pytest.mark.cluster

PROGRAM = 'program() { mkdir bin; printf "#!/bin/sh\\n%s\\n" "$2" >bin/$1; chmod +x bin/$1; PATH=$PWD/bin:$PATH; }'
IN_ITS_OWN_MOUNTS = ["unshare", "--mount", "sh", "-c"]


class Bench:
    """A folder with a config, in which the doctor is run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.overrides: list[str] = []
        self.environment = {"TORCH_EXTENSIONS_DIR": str(folder / "extensions")}
        self.before = ""
        """Shell commands to run first in the folder, with the doctor's command line in "$@"; `program` puts one of that
        name and text first on the PATH."""
        self.options = ["--quick"]

    def examine(self) -> tuple[int, dict[str, dict]]:
        """Exit code, and the worst finding of each check."""
        config = self.folder / "run.yaml"
        config.write_text(
            f"model: {{architecture: llama, config: {{num_hidden_layers: 1, hidden_size: 32}}}}\n"
            f"run: {{dir: {self.folder}/runs}}\ndata: {{cache_dir: {self.folder}/cache}}\n"
        )
        command = [sys.executable, "-m", "launch.doctor", "--json", "--config", str(config), *self.options]
        command += ["--port", str(free_port())] if "--port" not in self.options else []
        command += self.overrides
        if self.before:
            shell = IN_ITS_OWN_MOUNTS if "mount" in self.before else ["sh", "-c"]
            first = f"{PROGRAM}; cd {self.folder}; {self.before}; cd {REPOSITORY}"
            command = [*shell, f'{first}; exec "$@"', "sh", *command]
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP", "WANDB"))}
        environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", **self.environment}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout, done.stderr
        findings = sorted(json.loads(done.stdout)["findings"], key=lambda item: item["level"] != "green")
        findings.sort(key=lambda item: ("green", "amber", "red").index(item["level"]))
        return done.returncode, {item["check"]: item for item in findings}


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_healthy_machine(bench):
    code, found = bench.examine()
    assert code == 0
    assert {check for check, item in found.items() if item["level"] == "red"} == set()
    assert {"c++ compiler", "ninja", "open files", "run folder", "versions", "port", "/dev/shm"} <= found.keys()
    assert "MB/s" in found["run folder"]["what"] and "torch 2." in found["versions"]["what"]
    assert {path.name for path in bench.folder.iterdir()} == {"run.yaml"}  # looking leaves nothing behind


def test_a_run_without_wandb_is_not_asked_for_it(bench):
    bench.overrides = ["tracking.sinks=[csv]"]
    assert "wandb" not in bench.examine()[1]


def taken_port(bench: Bench) -> socket.socket:
    listener = socket.create_server(("", 0))
    bench.options += ["--port", str(listener.getsockname()[1])]
    return listener


def lock_of_a_build(bench: Bench) -> object:
    lock = bench.folder / LOCK
    lock.parent.mkdir(parents=True)
    return lock.open("w")


LOCK = "extensions/py311_cpu/cpu_adam/lock"
MOUNT = "mount -t tmpfs none -o"
FULL_DISK = f"mkdir runs; {MOUNT} size=1m runs; head -c 2000000 /dev/zero >runs/it 2>&-"
NO_DRIVER = "program nvidia-smi 'echo NVIDIA-SMI has failed because it could not talk to the driver.; exit 9'"
BROKEN_MEMORY = "program nvidia-smi 'echo GPU 0: H200; echo NVIDIA H200, 575.57, 143771, 4, 34, 3, Not Active'"
TOO_MANY_THREADS = f"export OMP_NUM_THREADS={os.cpu_count()}"
# Even root needs these to read a folder that nobody may.
DROP = 'set -- setpriv --bounding-set=-dac_override,-dac_read_search "$@"; ' if os.geteuid() == 0 else ""
UNREADABLE = f"mkdir 0; chmod 0 0; {DROP}"
NO_SUCH_USER = """set -- "$@" 'run.dir=~nosuchuser'"""
# A fault's name: a function of the bench, or what Bench.before says; the level, the check and the words of its finding.
FAULTS = {
    "taken_port": (taken_port, "red", "port", "Address already in use"),
    "no_compiler": (f"PATH={BIN}", "amber", "c++ compiler", "offload from a GPU and model.compile need one"),
    "stale_lock": (f"mkdir -p $(dirname {LOCK}); touch {LOCK}", "red", "op build", LOCK),
    "lock_of_a_build": (lock_of_a_build, "amber", "op build", f"process {os.getpid()} builds at"),
    "other_ninja": ("program ninja 'echo 1.10.0'", "amber", "ninja", f"bin/ninja 1.10.0 comes before {BIN}/ninja"),
    "few_files": ("ulimit -n 64", "red", "open files", "ulimit -n is 64"),
    "unwritable": ('set -- "$@" run.dir=/proc/sys', "red", "run folder", "/proc/sys/run: "),
    "a_file_in_the_way": ("touch runs", "red", "run folder", "Not a directory"),
    "unreadable": (f'{UNREADABLE}set -- "$@" run.dir=$PWD/0/a', "red", "run folder", "0/a/run: Permission denied"),
    "unreadable_builds": (
        *(f"{UNREADABLE}export TORCH_EXTENSIONS_DIR=$PWD/0/a", "red"),
        *("op builds folder", "0/a: Permission denied"),
    ),
    "no_such_user": (NO_SUCH_USER, "red", "run folder", "Could not determine home directory"),
    "full_disk": (FULL_DISK, "red", "run folder", "No space left on device"),
    "nearly_full_disk": (f"mkdir runs; {MOUNT} size=100m runs", "red", "run folder", "100.0 MiB free on tmpfs"),
    "no_execution": (f"mkdir extensions; {MOUNT} noexec extensions", "red", "op builds folder", "mounted noexec"),
    "docker_shm": (f"{MOUNT} size=64m /dev/shm", "red", "/dev/shm", "64.0 MiB"),
    "too_many_threads": (TOO_MANY_THREADS, "amber", "threads", "times 2 processes is more than"),
    "nonsense_threads": ("export OMP_NUM_THREADS=all", "red", "threads", "OMP_NUM_THREADS = 'all'"),
    "no_login": ('export NETRC=$PWD/netrc; set -- "$@" tracking.wandb=online', "amber", "wandb", "there is no login"),
    "refused_config": ('set -- "$@" deepspeed.stage=0', "red", "run config", "BF16 with ZeRO-0 is refused"),
    "no_driver": (NO_DRIVER, "red", "gpu", "could not talk to the driver"),
    "broken_memory": (BROKEN_MEMORY, "red", "gpu", "3 uncorrected memory errors"),
}


@pytest.mark.parametrize(("plant", "level", "check", "words"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_and_named(bench, plant, level, check, words):
    if isinstance(plant, str):
        bench.before, kept = plant, None
    else:
        kept = plant(bench)
    if "mount" in bench.before and os.geteuid() != 0:
        pytest.skip("mounting needs root")
    code, found = bench.examine()
    assert found[check]["level"] == level, found
    assert words in found[check]["what"] and found[check]["fix"], found[check]
    assert code == (1 if level == "red" else 0)
    assert {name for name, item in found.items() if item["level"] == "red"} <= {check}  # nothing else is
    assert {"versions", "port", "/dev/shm"} <= found.keys()
    del kept


def test_what_needs_torch(bench):
    """A key that is not there, a store that cannot be written, an interface that does not exist: one run finds all."""
    bench.options = ["--all-reduce", "1", "--deepspeed_config", "ds_configs/zero2_bf16_offload.json"]
    bench.overrides = ["checkpoint.encryption_key=env:NO_SUCH_KEY", "checkpoint.dir=file:///proc/store"]
    bench.environment["GLOO_SOCKET_IFNAME"] = "nosuch0"
    code, found = bench.examine()
    assert code == 1
    red = {name for name, item in found.items() if item["level"] == "red"}
    assert red == {"encryption key", "object store", "all-reduce"}
    assert "NO_SUCH_KEY" in found["encryption key"]["what"]
    assert "/proc/store" in found["object store"]["what"]
    assert "nosuch0" in found["all-reduce"]["what"], found["all-reduce"]
    assert found["bf16"]["level"] == "green" and "off by" in found["bf16"]["what"]
    assert found["op compatibility"]["level"] == "green"
    assert found["offload memory"]["what"].startswith("optimizer: ")


ASK = """
import sys
from launch.doctor.hosts import Host, on_all

def ask(hosts, ssh, token):
    for host in hosts:
        host.connect(ssh)
    program = "import time; time.sleep(100)"
    given = dict(program=program, given=token, limit=100.0, cwd=".", launcher=[])
    on_all(hosts, lambda host: host.ask("run", 100.0, **given))

"""


def interrupt(command, programs: int) -> None:
    """Start `command` with a token, wait for programs that were given it, send Ctrl-C: they and it must end soon."""
    token = secrets.token_hex(8)

    def running() -> int:
        count = 0
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                words = path.read_bytes().split(b"\0")
                count += len(words) > 2 and words[1].endswith(b"/program.py") and token.encode() in words[2]
        return count

    job = subprocess.Popen(command(token), cwd=REPOSITORY, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        wait_until(lambda: running() == programs, seconds=60, why=running)
        os.killpg(job.pid, signal.SIGINT)
        job.wait(timeout=30)
        wait_until(lambda: running() == 0, why=running)
    finally:
        job.kill()


def test_ctrl_c_ends_what_runs():
    script = f"{ASK}ask([Host('localhost', local=True)], [], sys.argv[1])"
    interrupt(lambda token: [sys.executable, "-c", script, token], programs=1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hostfile", "{folder}/none"], "--hostfile {folder}/none: cannot be read"),
        (["--hostfile", "{folder}/empty"], "{folder}/empty: names no host"),
        (["--hostfile", "{folder}/bad"], "{folder}/bad: line 2: 'node-1 slot=2' is not NAME slots=N"),
        (["--config", "{folder}/none"], "{folder}/none"),
        (["run.steps=3"], "command line: run.steps=3 changes a config; add --config FILE"),
        (["--port", "zero"], "argument --port: zero is not a whole number of 1 or more"),
        (["--port", "65536"], "argument --port: 65536 is no port"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(tmp_path, options, words):
    (tmp_path / "empty").write_text("# none\n")
    (tmp_path / "bad").write_text("node-0 slots=2\nnode-1 slot=2\n")
    command = [sys.executable, "-m", "launch.doctor", *(option.format(folder=tmp_path) for option in options)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    assert words.format(folder=tmp_path) in done.stderr
