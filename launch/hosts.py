"""The machines of a supervised `deepspeed --hostfile` job: which of them answer, and the job's processes on them.

A launcher that dies leaves its ranks on the other machines running; only ssh reaches them. They carry a mark in their
environment, so that nobody else's process is touched.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from config.errors import UserError
from launch.hostfile import read_hostfile

MARK = "PYTHON_SUPERVISED_BY"
"""Variable with the job's mark. The deepspeed launcher passes on what begins with PYTHON; Python does not know it."""
CONNECT_SECONDS = 10
ASK_AGAIN_SECONDS = 10.0
KILL_AFTER_SECONDS = 15
"""How long the job's processes on a machine have to end after SIGTERM; then SIGKILL."""
_OPTIONS = ("--hostfile", "-H")
_CHOOSING = (
    *("--include", "-i", "--exclude", "-e", "--num_nodes", "--num_gpus", "--num_accelerators"),
    *("--master_addr", "--no_ssh"),
)
# `p`: the job's processes there, and nobody else's; of these, those with a variable that is $1.
_FIND = (
    "p() { grep -lsxzF MARKED /proc/[0-9]*/environ"
    """ | xargs -r grep -lsxzE "${1:-.*}" | tr -dc '0-9\\n' | sort -n; }; """
)
_END = (
    'p | xargs -r kill -TERM; for i in $(seq TENTHS); do [ -z "$(p)" ] && exit; sleep 0.1; done; '
    "p | xargs -r kill -KILL"
)
_TELL = 'rank=$(p RANK=0 | head -n 1); [ -n "$rank" ] && kill -USR1 $rank'  # what a rank starts has a higher number


@dataclass(frozen=True)
class Hosts:
    """The machines that a command line names, and how to reach them."""

    slots: dict[str, int]
    """Processes of each machine, in the order of the hostfile."""
    launcher: tuple[str, ...]
    """The command line up to train.py."""
    rest: tuple[str, ...]
    """From train.py on."""
    ssh: tuple[str, ...]
    mark: str = field(default_factory=lambda: secrets.token_hex(8))

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Hosts | None:
        """None when it is not `deepspeed` with a hostfile. Raises UserError: the hostfile cannot be read."""
        script = next((index for index, word in enumerate(command) if word.endswith(".py")), len(command))
        launcher = list(command[:script])
        path = _value(launcher, _OPTIONS)
        if not launcher or Path(launcher[0]).name != "deepspeed" or path is None:
            return None
        port = _value(launcher, ("--ssh_port",))
        ssh = ("ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}", *(("-p", port) if port else ()))
        slots = read_hostfile(Path(path).expanduser())
        return cls(slots, tuple(launcher), tuple(command[script:]), ssh)

    def refuse_what_chooses(self) -> None:
        """Raises UserError: the command line itself says which machines, so that no others can be left out."""
        for word in self.launcher:
            if word.partition("=")[0] in _CHOOSING:
                raise UserError(f"--min-nodes: {word} chooses the machines already; leave one of the two out")

    def answering(self) -> list[str]:
        """Names of the machines on which ssh runs a command, in the hostfile's order. Takes up to 20 s."""
        answers = self._on_all(list(self.slots), "true")
        return [name for name, code in answers.items() if code == 0]

    def environment(self) -> dict[str, str]:
        """The launcher's: with the mark, and with an ssh that ends when a machine is out of reach for 60 s."""
        append = os.environ.get("PDSH_SSH_ARGS_APPEND", "")
        alive = "-o ServerAliveInterval=15 -o ServerAliveCountMax=4"
        return {**os.environ, MARK: self.mark, "PDSH_SSH_ARGS_APPEND": f"{append} {alive}".strip()}

    def command(self, names: Sequence[str], folder: Path) -> list[str]:
        """The command line that starts the job on these machines only; its hostfile is written into `folder`."""
        if list(names) == list(self.slots):
            return [*self.launcher, *self.rest]
        file = folder / "hostfile"
        file.write_text("".join(f"{name} slots={self.slots[name]}\n" for name in names))
        words = _without(self.launcher, (*_OPTIONS, "--force_multi"))
        # deepspeed starts a job of a single machine where it is itself, whatever that machine's name
        return [
            words[0],
            "--hostfile",
            str(file),
            *(["--force_multi"] if len(names) == 1 else []),
            *words[1:],
            *self.rest,
        ]

    def end(self, names: Sequence[str]) -> None:
        """End what there is of the job on these machines. Those that do not answer are left as they are."""
        script = _END.replace("TENTHS", str(10 * KILL_AFTER_SECONDS))
        self._on_all(names, self._found(script), CONNECT_SECONDS + KILL_AFTER_SECONDS + 10)

    def tell(self, names: Sequence[str]) -> bool:
        """SIGUSR1 to rank 0, wherever it is. False when it is nowhere."""
        return 0 in self._on_all(names, self._found(_TELL)).values()

    def _found(self, script: str) -> str:
        return _FIND.replace("MARKED", f"{MARK}={self.mark}") + script

    def _on_all(self, names: Sequence[str], script: str, seconds: float = 2 * CONNECT_SECONDS) -> dict[str, int]:
        """The exit code of `script` on each of the machines; 255 where it did not run."""

        def one(name: str) -> int:
            with suppress(subprocess.TimeoutExpired, OSError):
                done = subprocess.run(
                    [*self.ssh, name, script],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    timeout=seconds,
                    check=False,
                )
                return done.returncode
            return 255

        with ThreadPoolExecutor(64) as pool:
            return dict(zip(names, pool.map(one, names), strict=True))


@dataclass(frozen=True)
class Choice:
    """Which machines a start gets: as many of those that answer as make a number of processes that fits the batch."""

    hosts: Hosts
    fits: Callable[[int], bool]
    """Whether the global batch can be cut up for that many processes."""
    least: int | None
    """Machines that a start needs; None: all of the hostfile, and the first start does not look."""
    wait_minutes: float
    say: Callable[[str], None]
    stopped: Callable[[], bool]

    def first(self) -> list[str]:
        """For the first start. Raises UserError: too few answer."""
        if self.least is None:
            return list(self.hosts.slots)
        names, answering = self._look()
        if len(names) < self.least:
            raise UserError(f"--min-nodes {self.least}: {self._shortage(names, answering)}")
        self._tell(names, answering)
        return names

    def next(self) -> list[str] | None:
        """For a restart: waits until enough machines answer. None when that took too long, or the wait was stopped."""
        least, ends, told = self.least or len(self.hosts.slots), time.monotonic() + 60 * self.wait_minutes, False
        while not self.stopped():
            names, answering = self._look()
            if len(names) >= least:
                self._tell(names, answering)
                return names
            short = f"{self._shortage(names, answering)}; {least} are needed (--min-nodes)"
            if time.monotonic() > ends:
                self.say(f"{short}: given up after {self.wait_minutes:g} minutes (--wait-nodes)")
                return None
            if not told:
                self.say(f"{short}: waiting for up to {self.wait_minutes:g} minutes (--wait-nodes)")
                told = True
            pause = time.monotonic() + ASK_AGAIN_SECONDS
            while not self.stopped() and time.monotonic() < min(pause, ends):
                time.sleep(0.2)
        return None

    def _look(self) -> tuple[list[str], list[str]]:
        answering = self.hosts.answering()
        return largest(answering, self.hosts.slots, self.fits), answering

    def _tell(self, names: Sequence[str], answering: Sequence[str]) -> None:
        if len(names) < len(self.hosts.slots):
            processes = sum(self.hosts.slots[name] for name in names)
            count = f"{processes} process{'es' * (processes > 1)}"
            self.say(f"{self._shortage(names, answering)}; goes on with {count}, same global batch")

    def _shortage(self, names: Sequence[str], answering: Sequence[str]) -> str:
        slots = self.hosts.slots
        silent = [name for name in slots if name not in answering]
        spare = [name for name in answering if name not in names]
        parts = [f"no answer over ssh from {', '.join(silent)}"] if silent else []
        if spare:
            parts.append(f"{', '.join(spare)} left out, since batch.global_size cannot be cut up for more processes")
        return f"{len(names)} of {len(slots)} machines: {'; '.join(parts)}"


def largest(names: Sequence[str], slots: dict[str, int], fits: Callable[[int], bool]) -> list[str]:
    """The first machines of `names`, as many as give a number of processes that `fits`; none when no number does."""
    for count in range(len(names), 0, -1):
        if fits(sum(slots[name] for name in names[:count])):
            return list(names[:count])
    return []


def _value(words: Sequence[str], options: Sequence[str]) -> str | None:
    found = None
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            found = value if equals else (words[index + 1] if index + 1 < len(words) else None)
    return found


def _without(words: Sequence[str], options: Sequence[str]) -> list[str]:
    kept, skip = [], False
    for word in words:
        name, equals, _ = word.partition("=")
        if skip:
            skip = False
        elif name in options:
            skip = not equals and name != "--force_multi"
        else:
            kept.append(word)
    return kept
