"""A job over two machines by every launcher that has a recipe, against the same job on one; root, sshd and pdsh.

The machines are Linux namespaces with an sshd each: see tests/support/machines/machines.py.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.launcher import deepspeed_program
from tests.support.jobs import launches
from tests.support.jobs.launches import BIN, events, trace
from tests.support.machines.machines import SKIP, Machine, two_machines

REASON = SKIP or ("" if shutil.which("pdsh") else "not installed: pdsh; apt-get install pdsh")
pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(REASON), reason=REASON)]

PORT = "29511"


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def job(folder: Path, name: str, *overrides: str) -> list[str]:
    return launches.command("python", folder, name, *overrides)[1:]


def environment(folder: Path) -> dict[str, str]:
    """A user's, with what goes to the machines in a file of its own."""
    passed = {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    if "TORCH_EXTENSIONS_DIR" in os.environ:
        passed["TORCH_EXTENSIONS_DIR"] = os.environ["TORCH_EXTENSIONS_DIR"]
    (folder / "deepspeed_env").write_text("".join(f"{name}={value}\n" for name, value in passed.items()))
    prefixes = ("PYTHON", "GLOO", "RANK", "WORLD", "LOCAL", "MASTER", "ACCELERATE", "TORCHELASTIC")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}
    return kept | passed | {"DS_ENV_FILE": str(folder / "deepspeed_env")}


def on(machine: Machine, folder: Path, command: Sequence[str]) -> subprocess.Popen[str]:
    """`command` in the repository's folder of a machine."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    options |= {"cwd": REPOSITORY, "env": environment(folder), "start_new_session": True}
    return subprocess.Popen(machine.command(*command), **options)


def finish(started: Sequence[subprocess.Popen[str]], seconds: float = 400) -> list[str]:
    """The output of each process; all have exited with 0."""
    printed = [process.communicate(timeout=seconds)[0] for process in started]
    assert [process.returncode for process in started] == [0] * len(started), "\n".join(printed)
    return printed


def by_hostfile(machines: dict[str, Machine], folder: Path, *words: str) -> subprocess.Popen[str]:
    if " " in f"{REPOSITORY}{BIN}":
        pytest.skip("DeepSpeed does not quote this path for the other machine's shell (launch.doctor warns of it)")
    hostfile = machines["left"].folder.parent / "hostfile"
    command = [*deepspeed_program(), "--hostfile", str(hostfile), "--num_nodes", "2", "--master_port", PORT, *words]
    return on(machines["left"], folder, command)


def on_both(machines: dict[str, Machine], folder: Path, launcher: str, script: Sequence[str]) -> list[str]:
    """Start `launcher`, a command with {rank} and {head}, on each machine; what they printed."""
    started = []
    for rank, machine in enumerate(machines.values()):
        command = launcher.format(rank=rank, head="left", port=PORT).split()
        started.append(on(machine, folder, [*command, *script]))
    return finish(started)


def going_on(output: str) -> str:
    """The command that the job says goes on with it."""
    return next(line.split("resume", 1)[1].strip() for line in output.splitlines() if "resume   " in line)


def test_the_hostfile_of_two_machines_trains_as_one(machines, folder, unbroken):
    (output,) = finish([by_hostfile(machines, folder, *job(folder, "hostfile"))])
    assert trace(folder, "hostfile") == unbroken
    (started,) = events(folder, "hostfile", "run_start")
    assert (started["world_size"], started["zero_stage"]) == (2, 2)
    # each machine started its one rank: without that, both could have run on the first
    assert "global_rank_mapping=defaultdict(<class 'list'>, {'left': [0], 'right': [1]})" in output
    assert {line.split(":")[0] for line in output.splitlines() if "exits successfully" in line} == {"left", "right"}
    launcher = [*deepspeed_program(), "--hostfile", "launch/deepspeed/hostfile", "--num_nodes", "2", "--num_gpus", "1"]
    assert going_on(output).startswith(f"{shlex.join(launcher)} ")


LAUNCHERS = {
    "torchrun_static": "torchrun --nnodes 2 --nproc_per_node 1 --node_rank {rank} --master_addr {head} "
    "--master_port {port}",
    "torchrun_c10d": "torchrun --nnodes 2 --nproc_per_node 1 --rdzv-backend c10d --rdzv-id any "
    "--rdzv-endpoint {head}:{port}",
    **{
        f"accelerate_{stage}": f"accelerate launch --config_file launch/accelerate/several_machines_zero{stage}.yaml "
        "--num_machines 2 --num_processes 2 --machine_rank {rank} --main_process_ip {head} --main_process_port {port}"
        for stage in (2, 3)
    },
}


@pytest.mark.parametrize("launcher", ["torchrun_static", "torchrun_c10d"])
def test_torchrun_on_two_machines_trains_as_one(machines, folder, unbroken, launcher):
    printed = on_both(machines, folder, LAUNCHERS[launcher], job(folder, launcher))
    assert trace(folder, launcher) == unbroken
    # with c10d whoever comes first is rank 0, and one process of the two speaks
    (spoken,) = [text for text in printed if "resume   " in text]
    assert going_on(spoken).startswith(LAUNCHERS[launcher].format(rank=0, head="left", port=PORT))


def test_accelerate_on_two_machines_trains_as_one(machines, folder, unbroken):
    on_both(machines, folder, LAUNCHERS["accelerate_2"], job(folder, "accelerate_2"))
    assert trace(folder, "accelerate_2") == unbroken


def test_the_command_a_run_prints_starts_it_again(machines, folder):
    """On both machines, as printed, with the other's rank on the second."""
    printed = on_both(machines, folder, LAUNCHERS["accelerate_2"], job(folder, "again"))
    words = shlex.split(going_on(printed[0]))
    at = words.index("--machine_rank") + 1
    both = enumerate(machines.values())
    finish([on(machine, folder, [*words[:at], str(rank), *words[at + 1 :], "run.steps=8"]) for rank, machine in both])
    assert [event["world_size"] for event in events(folder, "again", "run_start")] == [2, 2]
    assert [step["step"] for step in trace(folder, "again")] == [*range(1, 9)]
