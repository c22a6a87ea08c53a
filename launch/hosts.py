"""The machines of a supervised `deepspeed --hostfile` job: which ones are reachable, and the job's processes there.

A launcher that dies leaves its ranks running on the other machines, where they can only be ended over ssh. An
environment variable with the job's id identifies them, so that no other process is affected.
"""

import os
import re
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Self

from config.errors import UserError

JOB_ID_VARIABLE = "PYTHON_SUPERVISED_BY"
"""Starts with PYTHON so that the deepspeed launcher exports it; Python itself ignores it."""
CONNECT_SECONDS = 10
POLL_SECONDS = 10.0
KILL_AFTER_SECONDS = 15
"""[seconds] Time between SIGTERM and SIGKILL for the job's processes on a machine."""
_HOSTFILE_OPTIONS = ("--hostfile", "-H")
_SELECTION_OPTIONS = (
    *("--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--num_accelerators"),
    *("--master_addr", "--no_ssh"),
)
# Defines p, which prints the pids of this job's processes, optionally only those with the environment entry $1.
_FIND_PROCESSES = (
    "p() { grep -lsxzF JOB_ID /proc/[0-9]*/environ"
    """ | xargs -r grep -lsxzE "${1:-.*}" | tr -dc '0-9\\n' | sort -n; }; """
)
_END_PROCESSES = (
    'p | xargs -r kill -TERM; for i in $(seq TENTHS); do [ -z "$(p)" ] && exit; sleep 0.1; done; '
    "p | xargs -r kill -KILL"
)
_SIGNAL_RANK_0 = 'rank=$(p RANK=0 | head -n 1); [ -n "$rank" ] && kill -USR1 $rank'  # its children have higher pids


@dataclass(frozen=True)
class Hosts:
    """The machines named by a `deepspeed` command line, and how to reach them."""

    slots: dict[str, int]
    """Machine to its number of processes, as the launcher's options select them, in hostfile order."""
    launcher: tuple[str, ...]
    """Words of the command line before train.py."""
    rest: tuple[str, ...]
    """Words of the command line from train.py on."""
    ssh: tuple[str, ...]
    job_id: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Self | None:
        """The machines of a `deepspeed` command that reaches them over ssh; None for others. Raises UserError."""
        script = next((index for index, word in enumerate(command) if word.endswith(".py")), len(command))
        launcher = list(command[:script])
        path = option_value(launcher, *_HOSTFILE_OPTIONS)
        if not launcher or Path(launcher[0]).name != "deepspeed" or path is None:
            return None
        if "--no-ssh" in {word.replace("_", "-") for word in launcher}:
            return None  # it starts this machine's ranks alone
        port = option_value(launcher, "--ssh-port")
        ssh = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *(("-p", port) if port else ()))
        slots = selected(read_hostfile(Path(path).expanduser()), launcher)
        return cls(slots, tuple(launcher), tuple(command[script:]), ssh)

    @property
    def is_here(self) -> bool:
        """Whether the launcher starts the job here, as it does that of a single machine, whatever its name."""
        return len(self.slots) == 1 and "--force-multi" not in {word.replace("_", "-") for word in self.launcher}

    def reachable(self) -> list[str]:
        """Names of the machines on which ssh can run a command, in hostfile order. Takes up to 20 s."""
        codes = self._run_on(list(self.slots), "true")
        return [name for name, code in codes.items() if code == 0]

    def environment(self) -> dict[str, str]:
        """Environment of the launcher: includes the job's id, and makes ssh give up on a machine silent for 60 s."""
        append = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        alive = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"
        return {**os.environ, JOB_ID_VARIABLE: self.job_id, "PDSH_SSH_ARGS_APPEND": f"{append} {alive}".strip()}

    def command(self, names: Sequence[str], folder: Path) -> list[str]:
        """Command line that starts the job on these machines only; writes its hostfile into `folder`."""
        if list(names) == list(self.slots):
            return [*self.launcher, *self.rest]
        file = folder / "hostfile"
        file.write_text("".join(f"{name} slots={self.slots[name]}\n" for name in names), encoding="utf-8")
        words = without_options(self.launcher, *_HOSTFILE_OPTIONS, flags=["--force-multi"])
        # Without --force_multi, deepspeed starts the job of a single machine locally, whatever its name.
        multi = ["--force_multi"] if len(names) == 1 else []
        return [words[0], "--hostfile", str(file), *multi, *words[1:], *self.rest]

    def end_processes(self, names: Sequence[str]) -> None:
        """End the job's processes on these machines. Unreachable machines are skipped."""
        script = _END_PROCESSES.replace("TENTHS", str(10 * KILL_AFTER_SECONDS))
        self._run_on(names, script, CONNECT_SECONDS + KILL_AFTER_SECONDS + 10)

    def signal_rank_0(self, names: Sequence[str]) -> bool:
        """Send SIGUSR1 to rank 0, on whichever machine it runs; False if it runs on none."""
        return 0 in self._run_on(names, _SIGNAL_RANK_0).values()

    def _run_on(self, names: Sequence[str], script: str, seconds: float = 2 * CONNECT_SECONDS) -> dict[str, int]:
        """Machine to the exit code of `script`, which may call `p`; 255 if it did not run."""
        script = _FIND_PROCESSES.replace("JOB_ID", f"{JOB_ID_VARIABLE}={self.job_id}") + script

        def one(name: str) -> int:
            with suppress(subprocess.TimeoutExpired, OSError):
                quiet: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
                command = ["sh", "-c", script] if self.is_here else [*self.ssh, name, script]
                return subprocess.run(command, timeout=seconds, check=False, **quiet).returncode
            return 255

        with ThreadPoolExecutor(64) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))


@dataclass(frozen=True)
class HostSelection:
    """Chooses the machines for each start: as many reachable ones as possible whose processes divide the batch."""

    hosts: Hosts
    fits: Callable[[int], bool]
    """Whether the global batch divides among this many processes."""
    min_nodes: int | None
    """[machines] Minimum number for a start; None requires all of them, and the first start skips the probe."""
    wait_minutes: float
    log: Callable[[str], None]
    stopped: Callable[[], bool]

    def __post_init__(self) -> None:
        """Check `min_nodes`. Raises UserError if it does not fit the hostfile or the command."""
        if self.min_nodes is not None:
            count = len(self.hosts.slots)
            if not 1 <= self.min_nodes <= count:
                raise UserError(f"--min-nodes {self.min_nodes}: the hostfile has {count} machines; give 1 to that")
            for word in self.hosts.launcher:
                if word.partition("=")[0] in _SELECTION_OPTIONS:
                    raise UserError(f"--min-nodes: {word} selects the machines already; use only one of the two")

    def for_first_start(self) -> list[str]:
        """Machines for the first start. Raises UserError if too few are reachable."""
        if self.min_nodes is None:
            return list(self.hosts.slots)
        names, shortage = self._probe()
        if len(names) < self.min_nodes:
            raise UserError(f"--min-nodes {self.min_nodes}: {shortage}")
        self._log_shortage(names, shortage)
        return names

    def for_restart(self) -> list[str] | None:
        """Wait until enough machines are reachable and return those for a restart; None on a timeout or a stop."""
        needed, ends = self.min_nodes or len(self.hosts.slots), time.monotonic() + 60 * self.wait_minutes
        logged = False
        while not self.stopped():
            names, shortage = self._probe()
            if len(names) >= needed:
                self._log_shortage(names, shortage)
                return names
            short = f"{shortage}; {needed} are needed (--min-nodes)"
            if time.monotonic() > ends:
                self.log(f"{short}: given up after {self.wait_minutes:g} minutes (--wait-nodes)")
                return None
            if not logged:
                self.log(f"{short}: waiting for up to {self.wait_minutes:g} minutes (--wait-nodes)")
                logged = True
            pause = time.monotonic() + POLL_SECONDS
            while not self.stopped() and time.monotonic() < min(pause, ends):
                time.sleep(0.2)
        return None

    def _probe(self) -> tuple[list[str], str]:
        """The machines to use, and which others of the hostfile are not used and why."""
        slots, reachable = self.hosts.slots, self.hosts.reachable()
        names = most_that_fit(reachable, slots, self.fits)
        silent = [name for name in slots if name not in reachable]
        spare = [name for name in reachable if name not in names]
        parts = [f"no answer over ssh from {', '.join(silent)}"] if silent else []
        if spare:
            parts.append(f"{', '.join(spare)} left out, since batch.global_size does not divide among more processes")
        return names, f"{len(names)} of {len(slots)} machines: {'; '.join(parts)}"

    def _log_shortage(self, names: Sequence[str], shortage: str) -> None:
        if len(names) < len(self.hosts.slots):
            processes = sum(self.hosts.slots[name] for name in names)
            count = f"{processes} process{'es' * (processes > 1)}"
            self.log(f"{shortage}; continues with {count}, same global batch")


def most_that_fit(names: Sequence[str], slots: dict[str, int], fits: Callable[[int], bool]) -> list[str]:
    """The longest prefix of `names` whose total number of processes `fits`; empty if there is none."""
    prefixes = (list(names[:count]) for count in range(len(names), 0, -1))
    return next((prefix for prefix in prefixes if fits(sum(slots[name] for name in prefix))), [])


def read_hostfile(path: Path) -> dict[str, int]:
    """Machine to its slots (processes), in file order. Raises UserError if it is not a hostfile."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    slots: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        if match is None or match[1].startswith("-"):
            raise UserError(f"{path}: line {number}: {line!r} is not NAME slots=N; correct it")
        if match[1] in slots:
            raise UserError(f"{path}: line {number}: {match[1]} is there twice; add its slots up in one line")
        slots[match[1]] = int(match[2])
    if not slots:
        raise UserError(f"{path}: names no host; write a line such as worker-0 slots=8")
    return slots


def selected(slots: dict[str, int], words: Sequence[str]) -> dict[str, int]:
    """Slots of a hostfile that the options of a `deepspeed` command line select; its launcher checks the options."""

    def named(*options: str) -> dict[str, int]:
        """Machine to the number of slots named in NAME:0,2@NAME, all of them for a name alone."""
        ids: dict[str, set[str]] = {}
        for part in (option_value(words, *options) or "").split("@"):
            name, _, listed = part.partition(":")
            ids.setdefault(name, set()).update(filter(None, listed.split(",")))
        return {name: len(given) or slots[name] for name, given in ids.items() if name in slots}

    def number(*options: str) -> int | None:
        value = option_value(words, *options) or ""
        return int(value) or None if value.isdecimal() else None  # -1 and 0 are all

    included, excluded = named("--include", "-i"), named("--exclude", "-e")
    left = {name: included.get(name, 0 if included else count) - excluded.get(name, 0) for name, count in slots.items()}
    names = [name for name, count in left.items() if count > 0][: number("--num-nodes")]
    each = number("--num-gpus", "--num-accelerators")
    return {name: each or left[name] for name in names}


def option_value(words: Sequence[str], *options: str) -> str | None:
    """Last value of an option in a launcher's command line, with `-` or `_`, as two words or with `=`; else None."""
    found = None
    for word, following in zip_longest(words, words[1:]):
        name, equals, value = word.partition("=")
        if name.replace("_", "-") in options:
            found = value if equals else following
    return found


def without_options(words: Sequence[str], *options: str, flags: Sequence[str] = ()) -> list[str]:
    """A launcher's command line without `options`, which take a value, and `flags`, which do not."""
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        name = name.replace("_", "-")
        if skip:
            skip = False
        elif name in options:
            skip = not equals
        elif name not in flags:
            kept.append(word)
    return kept
