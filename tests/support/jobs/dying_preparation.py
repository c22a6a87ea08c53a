"""train.py of which a process dies while data are prepared: one argument is WHO:PHASE:MARK, the others its own.

WHO is `holder`, the rank that prepares; `other`, one that does not; or `worker`, a tokenizing process of the holder.
It dies by SIGKILL, a worker as its rank reaches the phase; and leaves the file MARK, where that is not yet there.
"""

import functools
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import train
from data.text import prepare
from tests.support.jobs.launches import children

PHASES: dict[str, tuple[str, ...]] = {
    "holder": ("tokenizer", "tokenizing", "writing", "publishing", "validating"),
    "other": ("waiting", "validating"),
    "worker": ("starting", "tokenizing"),
}
SLOW_SECONDS = 8.0
"""The extra time for which the holder tokenizes while another rank, waiting for it, dies."""
_holds = False


def main(arguments: list[str]) -> int:
    """Run the job."""
    death = next(word for word in arguments if word.partition(":")[0] in PHASES)
    who, phase, mark = death.split(":", 2)
    prepare.BATCH_CHARACTERS = 2000
    _follow(prepare, "_prepare_locked", _take)
    reached = functools.partial(_reached, who, phase, Path(mark))
    _follow(prepare, "make_tokenizer", lambda: reached("holder", "tokenizer"))
    _follow(prepare._SplitWriter, "add", lambda: (reached("holder", "tokenizing"), reached("worker", "tokenizing")))
    _follow(prepare, "write_shard", lambda: reached("holder", "writing"))
    _follow(prepare, "write_index", lambda: reached("holder", "publishing"))
    _follow(prepare, "read_progress", lambda: reached("other", "waiting"))
    _follow(prepare, "open_corpus", lambda: reached("holder" if _holds else "other", "validating"))
    if (who, phase) == ("worker", "starting"):
        _kill_first_child(Path(mark))
    return train.main([word for word in arguments if word != death])


def _follow(owner: Any, name: str, before: Callable[[], object]) -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def followed(*arguments: Any, **named: Any) -> Any:
        before()
        return function(*arguments, **named)

    setattr(owner, name, followed)


def _take() -> None:
    global _holds
    _holds = True


def _reached(who: str, phase: str, mark: Path, role: str, place: str) -> None:
    if (who, phase) == ("other", "waiting") and role == "holder" and place == "tokenizing":
        time.sleep(SLOW_SECONDS)  # the other one has to find the lock taken
    if (who, phase) != (role, place) or mark.exists():
        return
    mark.touch()
    if who == "worker":
        commands = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children(os.getpid())}
        os.kill([pid for pid, command in commands.items() if b"spawn_main" in command][-1], signal.SIGKILL)
    else:
        time.sleep(1.0)
        os.kill(os.getpid(), signal.SIGKILL)


def _kill_first_child(mark: Path) -> None:
    from data.text import workers

    start = workers.Workers._start

    def killed(self: Any) -> Any:
        worker = start(self)
        if not mark.exists():
            mark.touch()
            os.kill(worker[0].pid, signal.SIGKILL)
        return worker

    workers.Workers._start = killed  # type: ignore[method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
