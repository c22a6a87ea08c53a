"""The demo on a strange machine: started by the real launcher, tiny, and looked at in everything that it leaves.

A `Place` says what is strange: the paths, the variables, the user, the mounts, the interpreter's options.
"""

import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from matplotlib.image import imread

from config.cli import REPOSITORY
from config.machine.processes import free_port
from launch.job import LAUNCHER_VARIABLES
from tests.support.servers.wandb_server import stand_in
from tracking.compare.surviving import read_events, surviving
from tracking.run_dir import RunDir
from training.checkpoint.tool import main as checkpoint_tool

STEPS, MORE = 4, 6
"""Steps of a first start, and of the one that goes on from it."""
SHAPE = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}"
TINY = (
    *("run.resume=auto", "data.source=text", "data.tokenizer=bytes", "data.sequence_length=32", "data.workers=1"),
    *("data.validation_fraction=0.2", f"model.config={SHAPE}", "batch.micro_size=2", "schedule.name=constant"),
    *("schedule.warmup_steps=2", "evaluate.every_steps=2", "evaluate.batches=2", "checkpoint.every_steps=2"),
    *("tracking.log_every_steps=1", "generate.tokens=8"),
)
"""The demo in a few seconds: its recipe, precision and ZeRO stage with a model of a few thousand parameters."""
USER = 23456
"""A user and group without a name, as in many a container."""


@dataclass(frozen=True)
class Place:
    """A machine and folder to start the demo on; values that are not given are those of an ordinary machine."""

    folder: Path
    """The folder for the runs and the prepared data; made by `start`."""
    code: Path = REPOSITORY
    """Mantissa's folder."""
    cwd: Path | None = None
    """The working folder, if it is not Mantissa's."""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    """Environment variables; None: not set."""
    bare: bool = False
    """Nothing else is in the environment but PATH, as with `env -i`."""
    inside: tuple[str, ...] = ()
    """The command that starts the interpreter."""
    settings: tuple[str, ...] = ()
    """Overrides of the config."""
    cache: Path | None = None
    """Prepared data, if not a cache in `folder`."""
    port: str | None = None
    """The launcher's; None: a free one."""
    python: str = sys.executable
    """The interpreter."""
    plain_user: bool = False
    """Started as USER, whose `folder` then is."""

    @property
    def run(self) -> Path:
        """The run folder."""
        return self.folder / "runs" / "demo"

    @property
    def environment(self) -> dict[str, str]:
        """Environment of the launcher."""
        left_out = (*LAUNCHER_VARIABLES, "PYTHONPATH", *self.variables)
        base = {"PATH": os.environ["PATH"]} if self.bare else {**os.environ, "OMP_NUM_THREADS": "1"}
        given = {name: value for name, value in self.variables.items() if value is not None}
        return {name: value for name, value in base.items() if name not in left_out} | given

    def command(self, *overrides: str) -> list[str]:
        """The command line, as in `make demo`."""
        return [
            *self.inside,
            *(as_plain_user(self.code, self.folder) if self.plain_user else ()),
            *(self.python, "-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus", "2"),
            *("--master_port", self.port or str(free_port())),
            *(str(self.code / "train.py"), "--config", str(self.code / "config/recipes/demo.yaml")),
            *TINY,
            f"data.path={self.code / 'data'}",
            f"data.cache_dir={self.cache or self.folder / 'cache'}",
            f"run.dir={self.folder / 'runs'}",
            *self.settings,
            *overrides,
        ]


def start(place: Place, *overrides: str) -> subprocess.Popen[bytes]:
    """The job, in a process group of its own."""
    place.folder.mkdir(parents=True, exist_ok=True)
    if place.plain_user:
        os.chown(place.folder, USER, USER)
    return subprocess.Popen(
        place.command(*overrides),
        env=place.environment,
        cwd=place.cwd or place.code,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def ended(job: subprocess.Popen[bytes], *, exit_code: int | None = 0, seconds: float = 240.0) -> str:
    """Wait for a job and check its exit code (None: whichever); what it printed. Nothing of it is left running."""
    try:
        output = job.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        raise AssertionError(f"still running after {seconds:g} s:\n{job.communicate()[0].decode()}") from None
    assert exit_code in (None, job.returncode), output
    return output


def demo(place: Place, *overrides: str, exit_code: int | None = 0) -> str:
    """Run it to its end; what it printed."""
    return ended(start(place, *overrides), exit_code=exit_code)


def starts(place: Place, losses: Sequence[float]) -> str:
    """A first start alone, and a look at all it leaves; what it printed. losses: of an ordinary machine."""
    output = demo(place, f"run.steps={STEPS}")
    look_at(place.run, output, losses[:STEPS])
    return output


def lives(place: Place, losses: Sequence[float]) -> str:
    """A first start, a second one that goes on from it, and a look at all they leave; what the first one printed.

    losses: of an ordinary machine.
    """
    output = starts(place, losses)
    again = demo(place, f"run.steps={MORE}")
    assert f"resumed from step {STEPS}" in again or f"step-{STEPS}" in again, again
    look_at(place.run, again, losses)
    return output


def losses_of(run: Path) -> list[float]:
    """The loss of every step that counts, from the first."""
    steps = [event for event in surviving(read_events(run / "events.jsonl")) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, len(steps) + 1))
    return [event["loss"] for event in steps]


def look_at(run: Path, output: str, losses: Sequence[float]) -> None:
    """Everything that a run leaves is there, readable, and says the same as on an ordinary machine."""
    for trouble in ("Traceback", "is switched off", "Error:"):
        assert trouble not in output, output
    run_dir, steps = RunDir(run), len(losses)
    found = losses_of(run)
    assert all(map(math.isfinite, found)) and found == list(losses), f"{found}\n{losses}\n{output}"
    last = list(read_events(run_dir.events))[-1]
    assert (last["event"], last["status"], last["exit_code"]) == ("run_end", "done", 0), last
    said: list[str] = []
    assert checkpoint_tool(["verify", str(run)], said.append) == 0, said
    assert any(f"step-{steps}: complete" in line for line in said), said
    assert imread(run_dir.plots / "run.png").shape[:2] == (975, 1560)
    report = run_dir.report.read_text(encoding="utf-8")
    assert report.startswith("# demo\n") and "**healthy" in report and "plots/run.png" in report
    assert run_dir.sample.read_text(encoding="utf-8")
    _look_at_wandb(run_dir, steps)


def _look_at_wandb(run_dir: RunDir, steps: int) -> None:
    """wandb's own reader sends the config and every step to a server."""
    log = (run_dir.path / "wandb.log").read_text(encoding="utf-8", errors="replace")
    assert "Traceback" not in log, log
    own = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    copy = run_dir.path.parent / "wandb to read"  # the reader leaves notes beside what it has read
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run_dir.wandb, copy)
    with stand_in() as server:
        settings = {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": "0" * 40, "HOME": str(copy)}
        command = [str(Path(sys.executable).with_name("wandb")), "sync", "--yes", str(copy)]
        done = subprocess.run(command, env=own | settings, cwd=copy, capture_output=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
    assert server.config["run"]["value"]["name"] == "demo"
    assert [row["step"] for row in server.history if "train/loss" in row] == list(range(1, steps + 1))


def copy_of_code(folder: Path) -> Path:
    """Mantissa's files as a stranger gets them, in a new folder: what git knows, and nothing that was built."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
    )
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, folder / name)
    return folder


def mounted(*script: str) -> tuple[str, ...]:
    """The prefix that starts a command behind mounts of its own, made by `script`."""
    return ("unshare", "--mount", "sh", "-e", "-c", f'{"; ".join(script)}; exec "$@"', "sh")


def as_plain_user(*needed_too: Path) -> tuple[str, ...]:
    """The prefix that starts a command as an unprivileged user, who can reach the interpreter and `needed_too`."""
    needed = {Path(sys.base_prefix).resolve(), Path(sys.prefix).resolve(), *needed_too}
    script = []
    for closed in sorted({closed for path in needed if (closed := _closed_above(path))}):
        inner = sorted(path for path in needed if path.is_relative_to(closed))
        hold = [f"/mnt/mantissa-{number}" for number, _ in enumerate(inner)]
        script += ["mount -t tmpfs none /mnt"]
        script += [f"mkdir {there}; mount --bind '{path}' {there}" for path, there in zip(inner, hold, strict=True)]
        script += [f"mount -t tmpfs -o mode=755 none '{closed}'"]
        script += [
            f"(umask 022; mkdir -p '{path}'); mount --move {there} '{path}'"
            for path, there in zip(inner, hold, strict=True)
        ]
    drop = ("setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups", "--inh-caps=-all", "--no-new-privs")
    return (*(mounted(*script) if script else ()), *drop)


def _closed_above(path: Path) -> Path | None:
    """The topmost folder above `path` that only its owner may enter."""
    closed = [folder for folder in path.parents if not folder.stat().st_mode & 0o001]
    return closed[-1] if closed else None


def why_no_mounts() -> str:
    """Why a case cannot have mounts or a user of its own; empty where it can."""
    if os.geteuid() != 0:
        return "mounts and other users need root"
    missing = [name for name in ("unshare", "setpriv", "mount") if shutil.which(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}; apt-get install util-linux"
    if subprocess.run(["unshare", "--mount", "true"], check=False, capture_output=True).returncode:
        return "this machine does not allow mount namespaces"
    return ""


needs_mounts = pytest.mark.skipif(bool(WHY_NOT := why_no_mounts()), reason=WHY_NOT)


def umask(mask: str) -> tuple[str, ...]:
    """The prefix that starts a command with that umask."""
    return ("sh", "-c", f'umask {mask}; exec "$@"', "sh")


def programs(folder: Path) -> Path:
    """A folder to be the whole PATH: what every system has; no git, compiler or ninja."""
    folder.mkdir()
    for name in ("sh", "bash", "env", "setpriv", "unshare", "mount", "mkdir", "uname", "ls", "cat", "id"):
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


def same_names(folder: Path) -> Path:
    """A folder for PYTHONPATH whose modules are called as Mantissa's packages are, and end who imports them."""
    folder.mkdir()
    for name in ("config", "data", "launch", "modeling", "precision", "tracking", "training", "train"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('another {name} was imported')\n", encoding="utf-8")
    return folder
