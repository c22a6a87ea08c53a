"""The doctor over two machines: network, host name, mounts and processes of their own, an sshd each, a cable between.

They are Linux namespaces, so this needs root and an sshd, and is skipped elsewhere.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.launch.doctor.test_one_machine import ASK, interrupt
from tests.support.jobs.launches import BIN
from tests.support.machines.machines import HOSTS, SKIP, Machine, two_machines

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(SKIP), reason=SKIP)]


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Machine]]:
    with two_machines(tmp_path_factory.mktemp("machines")) as both:
        yield both


def clean() -> dict[str, str]:
    """This environment without what would be passed on to the machines."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GLOO", "OMP"))}


def doctor(
    machines: dict[str, Machine], run_folder: Path, *options: str, seconds: float = 120
) -> tuple[int, list[dict]]:
    """Exit code and findings of the doctor, started on the left machine as a user would."""
    folder, work = machines["left"].folder.parent, run_folder.parent
    config = work / "run.yaml"
    config.write_text(
        f"model: {{architecture: llama}}\nrun: {{dir: {run_folder}}}\ndata: {{cache_dir: {work}/cache}}\n"
    )
    command = [sys.executable, "-m", "launch.doctor", "--hostfile", f"{folder}/hostfile", "--config", str(config)]
    command = machines["left"].command(*command, "--json", "--ssh", f"ssh -F {folder}/ssh_config", *options)
    done = subprocess.run(command, cwd=REPOSITORY, env=clean(), capture_output=True, text=True, timeout=seconds)
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)["findings"]


def bad(findings: list[dict]) -> dict[tuple[str, str], dict]:
    """The checks that failed, by check and host."""
    return {(item["check"], item["host"]): item for item in findings if item["level"] == "red"}


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "runs").mkdir()
    return tmp_path / "runs"


def test_two_healthy_machines(machines, run_folder):
    """Every check passes, the all-reduce between them included."""
    code, findings = doctor(machines, run_folder, "--all-reduce", "4", seconds=400)
    assert bad(findings) == {} and code == 0
    seen = {(item["check"], item["host"]) for item in findings}
    for host in machines:
        for check in ("ssh", "names", "clock", "network", "shared folder", "bf16", "c++ compiler"):
            assert (check, host) in seen
    (reduced,) = [item["what"] for item in findings if item["check"] == "all-reduce"]
    assert reduced.startswith("4 MiB over 2 processes by gloo")
    assert list(run_folder.iterdir()) == []  # nothing is left behind


def test_ctrl_c_ends_what_runs_on_the_machines(machines):
    ssh = ["ssh", "-F", str(machines["left"].folder.parent / "ssh_config")]
    script = f"{ASK}ask([Host('left'), Host('right')], {ssh}, sys.argv[1])"
    interrupt(lambda token: machines["left"].command(sys.executable, "-c", script, token), programs=2)


def etc_hosts(old: str, new: str) -> str:
    """The command that rewrites /etc/hosts, with one thing in it changed."""
    return f"printf '{HOSTS.replace(old, new)}' >/etc/hosts"  # the same file, which is mounted there


BACK = etc_hosts("", "")
OWN_NAME = "right resolves to 127.0.1.1"
CODE = REPOSITORY / "launch/supervise.py"
AHEAD = r"printf 'import time\nreal = time.time\ntime.time = lambda: real() + 100\n' >{python}/sitecustomize.py"
OTHER = "{python}/deepspeed-0.19.7.dist-info"
OTHER_DEEPSPEED = rf"mkdir {OTHER}; printf 'Name: deepspeed\nVersion: 0.19.7\n' >{OTHER}/METADATA"
ONLY_SSH = "ip rule add priority 10 sport 22 ipproto tcp table main; ip rule add priority 20 to 10.211.7.1 prohibit"
RULES_BACK = "ip rule del priority 10; ip rule del priority 20"
# A fault's name: commands to run on the right machine, whose Python looks into {python}; those that take it back, the
# check that must be red there, what it must name.
FAULTS = {
    "its name for the other is missing": (etc_hosts("10.211.7.1 left\n", ""), BACK, "names", "left does not resolve"),
    "its own name is a loopback address": (etc_hosts("10.211.7.2", "127.0.1.1"), BACK, "names", OWN_NAME),
    "its clock is 100 s ahead": (AHEAD, "rm {python}/sitecustomize.py", "clock", "s ahead of this machine"),
    "another version of deepspeed": (OTHER_DEEPSPEED, f"rm -r {OTHER}", "versions", "deepspeed is 0.19.7"),
    "another state of the code": (f"mount --bind /dev/null {CODE}", f"umount {CODE}", "versions", "Mantissa's code is"),
    "no such Python": (f"mount -t tmpfs none {BIN}", f"umount {BIN}", "ssh", f"it has no {sys.executable}"),
    "only ssh passes": (ONLY_SSH, RULES_BACK, "network", "no TCP connection to left"),
}


@contextmanager
def changed(machine: Machine, commands: str, back: str) -> Iterator[None]:
    """The machine after some commands; others undo them in the end."""
    plant, take_back = (f"set -e; {text.format(python=machine.folder / 'python')}" for text in (commands, back))
    machine.run("sh", "-c", plant)
    try:
        yield
    finally:
        machine.run("sh", "-c", take_back)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_machine_is_found_and_named(machines, run_folder, fault):
    commands, back, check, words = FAULTS[fault]
    with changed(machines["right"], commands, back):
        code, findings = doctor(machines, run_folder, "--quick")
    found = bad(findings)
    assert code == 1 and words in found[check, "right"]["what"], found
    assert found[check, "right"]["fix"]
    others = {key for key in found if key[0] != check}
    assert not others, found  # and nothing else is said to be wrong


def test_a_run_folder_that_is_not_shared(machines, run_folder):
    with changed(machines["right"], f"mount -t tmpfs none {run_folder}", f"umount {run_folder}"):
        code, findings = doctor(machines, run_folder, "--quick")
    found = bad(findings)
    assert code == 1 and found.keys() == {("shared folder", "left"), ("shared folder", "right")}
    assert "what left wrote is not seen here" in found["shared folder", "right"]["what"]


def test_an_sshd_that_is_not_there(machines, run_folder):
    config = machines["left"].folder.parent / "ssh_config"
    before = config.read_text()
    config.write_text(f"Host right\n Port 2\n{before}")
    try:
        code, findings = doctor(machines, run_folder, "--quick")
    finally:
        config.write_text(before)
    found = bad(findings)
    assert code == 1 and found.keys() == {("ssh", "right")}
    assert "port 2: Connection refused" in found["ssh", "right"]["what"]
    assert {item["check"] for item in findings if item["host"] == "left"} >= {"ssh", "port", "open files"}
