"""A lost rank is named in time, at a cost linear in the ranks; however a job ends, its folder says who and why."""

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config.cli import CONFIG_ERROR, LOST, REPOSITORY
from config.machine.members import Member, MemoryKills, describe_status, exit_status
from tests.support.jobs.launches import command, events, start, wait_until
from tests.support.marks import slow
from tests.support.runs.compare_runs import TOKENS_PER_STEP, start_fields, step_fields
from tests.training.watchdog.watch_cases import Ranks
from tracking.compare.surviving import read_events
from tracking.crash import Crash
from tracking.jsonl import JsonlSink
from tracking.record import Record
from tracking.status import run_status
from training.distributed import World
from training.watchdog import heartbeats
from training.watchdog.heartbeats import LEFT, LISTED, Heartbeats


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Runs scenarios of two ranks."""
    return Ranks(tmp_path_factory.mktemp("ranks"))


@contextmanager
def process_that(code):
    """A process that waits for a line and then runs `code`, and what another process knows of it."""
    process = subprocess.Popen([sys.executable, "-c", f"input()\n{code}"], stdin=subprocess.PIPE, text=True)
    here = Member.here(0)
    started = int(Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[19])
    try:
        yield process, Member(rank=3, host=here.host, pid=process.pid, started=started, machine=here.machine)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("code", "status", "words"),
    [
        ("import os; os.kill(os.getpid(), 9)", -9, "was killed by SIGKILL"),
        ("import os; os.kill(os.getpid(), 11)", -11, "was killed by SIGSEGV"),
        ("raise SystemExit(74)", 74, "ended with exit code 74"),
        ("pass", 0, "ended with exit code 0"),
    ],
)
def test_the_kernel_tells_how_a_process_ended_until_its_parent_asks(code, status, words):
    with process_that(code) as (process, member):
        assert member.alive and exit_status(member) is None
        handle = os.pidfd_open(process.pid)
        process.stdin.write("\n")
        process.stdin.flush()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not member.alive
        assert exit_status(member) == status
        assert describe_status(status) == words
        process.wait()
        assert exit_status(member) is None and not member.alive
        if tuple(int(part) for part in os.uname().release.split(".")[:2]) >= (6, 15):
            assert exit_status(member, handle) == status
        os.close(handle)


def test_a_process_that_stands_still_says_why_and_another_of_its_number_is_not_it():
    with process_that("pass") as (process, member):
        assert member.standstill is None
        process.send_signal(signal.SIGSTOP)
        wait_until(lambda: member.standstill == "stopped by a signal")
        stranger = Member(3, member.host, member.pid, member.started - 1, member.machine)
        assert not stranger.alive and stranger.standstill is None and exit_status(stranger) is None


def test_memory_is_blamed_when_the_kernel_counted_a_kill():
    now = MemoryKills.now()
    assert now.machine is not None and now.machine >= 0
    assert "most likely a person" in MemoryKills.now().since(now)
    assert "this cgroup's count of out-of-memory kills rose from 1 to 2" in MemoryKills(2, 9).since(MemoryKills(1, 8))
    assert "this machine's count of out-of-memory kills rose from 8 to 9" in MemoryKills(1, 9).since(MemoryKills(1, 8))
    assert MemoryKills(None, None).since(now) == "most often the machine ran out of memory"


def test_a_rank_killed_on_another_machine_is_named_with_its_signal(ranks):
    """Nobody else is there: what the small process beside it says is all that tells."""
    codes, logs, seconds = ranks.run("killed_beside_its_witness", elsewhere=True)
    assert codes == [LOST, -signal.SIGKILL]
    (line,) = logs[0].splitlines()
    assert line.startswith("error: rank 1 (pid ") and " was killed by SIGKILL, seen at " in line
    assert "person or the batch system); rank 0 stops, exit code 69" in line


def test_a_rank_that_comes_to_no_collective_is_ended_all_the_same(ranks):
    """In NCCL, too, a collective whose partner is gone does not return before its time-out."""
    codes, logs, seconds = ranks.run("killed_while_the_other_computes")
    assert codes == [LOST, -signal.SIGSEGV]
    assert "rank 1 (pid " in logs[0] and "was killed by SIGSEGV" in logs[0]
    assert seconds < 30


def test_a_bug_keeps_its_traceback_and_is_told_to_ranks_of_other_machines(ranks):
    codes, logs, _ = ranks.run("failed", elsewhere=True)
    assert codes == [LOST, 1]
    assert "Traceback" in logs[1] and "ValueError: a bug of our own" in logs[1]
    where = r"\(in .*watch_cases\.py:\d+ failed\)"
    assert re.search(rf"error: rank 1 \(pid .*\) stopped: ValueError: a bug of our own {where}; rank 0 stops", logs[0])
    assert "Traceback" not in logs[0]


def test_a_bug_of_every_rank_is_nobody_elses_fault(ranks):
    codes, logs, _ = ranks.run("failed_both")
    assert codes == [1, 1]
    assert all("Traceback" in log and "RuntimeError: Connection of layers is wrong" in log for log in logs)


@pytest.mark.parametrize("scenario", [slow("rank_0_late"), "rank_1_late", "rank_0_gone"])
def test_a_mistake_that_every_rank_meets_is_printed_by_one(ranks, scenario):
    """However late the other one meets it, and though no launcher has ended that one by then."""
    codes, logs, _ = ranks.run(scenario, longer=60.0)
    assert codes == [CONFIG_ERROR, CONFIG_ERROR]
    told = [line for log in logs for line in log.splitlines() if line.startswith("error: ")]
    assert told == [f"error: no such folder{' (rank 1)' * (scenario == 'rank_0_late')}"]


@pytest.mark.parametrize(
    ("elsewhere", "timeout", "state", "waits"),
    [
        (False, 6, "has been stopped by a signal for ", "1 s; rank 0 waits for it"),
        slow(True, 10, "has been silent for ", "1 s, stopped or too busy to run Python; rank 0 waits for it"),
    ],
)
def test_a_rank_that_stands_still_is_spoken_of_and_named_at_the_time_out(ranks, elsewhere, timeout, state, waits):
    codes, logs, _ = ranks.run("stopped", elsewhere=elsewhere, timeout=timeout)
    assert codes == [LOST, -signal.SIGKILL]  # stopped until the test killed it
    told, named = logs[0].splitlines()
    assert state + waits in told
    assert named.startswith("error: rank 1 (pid ") and state in named


def test_a_rank_that_did_not_come_is_named_with_the_place_where_it_is(ranks):
    codes, logs, _ = ranks.run("absent", timeout=6)
    assert codes[0] == LOST
    assert "error: rank 1 (pid " in logs[0] and " is in tests/training/watchdog/watch_cases.py:" in logs[0]
    assert " absent for " in logs[0]


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rank_may_leave_when_all_are_done(ranks, elsewhere):
    codes, logs, _ = ranks.run("fine", elsewhere=elsewhere)
    assert codes == [0, 0]
    assert logs == ["", ""]


QUICK = ("checkpoint.every_steps=0", "evaluate.every_steps=0", "generate.tokens=0")


def die(folder: Path, name: str, told: str) -> tuple[list[int | None], str]:
    """A job of two ranks in which one dies as dying_train.py is told: exit codes by rank, and output."""
    line = command("python", folder, name, f"run.hypothesis={told}", *QUICK)
    job = start([line[0], str(REPOSITORY / "tests/support/jobs/dying_train.py"), *line[2:]], ranks=2)
    output, _ = job.communicate(timeout=120)
    return job.exit_codes, output


@pytest.mark.parametrize(("lost", "left"), [(0, 1), slow(1, 0)])
def test_a_killed_rank_is_named_in_the_end_that_another_one_writes(folder, lost, left):
    name = f"killed-{lost}"
    codes, output = die(folder, name, f"SIGKILL,{lost},3,")
    assert (codes[lost], codes[left]) == (-9, LOST), output
    (end,) = events(folder, name, "run_end")
    assert (end["status"], end["exit_code"], end["step"], end["written_by_rank"]) == ("crashed", LOST, 3, left)
    assert re.match(rf"rank {lost} \(pid \d+ on .*\) was killed by SIGKILL, seen at ", end["reason"])
    assert f"error: {end['reason']}; rank {left} stops, exit code {LOST}" in output and "Traceback" not in output
    status = run_status(folder / "runs" / name)
    assert (status.state, status.cause, status.exit_code, status.step) == ("crashed", end["reason"], LOST, 3)


def test_an_exception_is_named_with_its_line_by_the_rank_that_raised_it(folder):
    codes, output = die(folder, "error", "error,1,2,")
    assert codes == [LOST, 1], output
    (end,) = events(folder, "error", "run_end")
    assert (end["status"], end["exit_code"], end["step"], end["written_by_rank"]) == ("crashed", 1, 2, 1)
    assert re.match(r"rank 1 \(pid \d+ on .*\) stopped: ValueError: a bug of our own ", end["reason"])
    assert re.search(r"\(in tests/support/jobs/dying_train.py:\d+ die\)$", end["reason"])


def session(path: Path, *, steps: int = 2) -> None:
    record = Record([JsonlSink(path)])
    record.event("run_start", step=0, tokens=0, **start_fields())
    for step in range(1, steps + 1):
        record.event("step", step=step, tokens=step * TOKENS_PER_STEP, **step_fields(step))
    record.close()


def test_one_end_is_written_however_many_ranks_try(tmp_path):
    path = tmp_path / "events.jsonl"
    crashes = [Crash(path, rank) for rank in range(3)]
    session(path)
    assert [crash.write("rank 9\nis gone", 69) for crash in crashes] == [True, False, False]
    end = list(read_events(path))[-1]
    assert (end["reason"], end["step"], end["tokens"]) == ("rank 9 is gone", 2, 2 * TOKENS_PER_STEP)


def test_an_end_written_before_the_last_step_of_rank_0_stays_the_only_one(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    crashes = [Crash(path, rank) for rank in range(2)]
    record = Record([JsonlSink(path)])
    record.event("run_start", step=0, tokens=0, **start_fields())
    record.event("step", step=1, tokens=TOKENS_PER_STEP, **step_fields(1))
    assert crashes[1].write("rank 1 stopped: ValueError", 1)
    record.event("step", step=2, tokens=2 * TOKENS_PER_STEP, **step_fields(2))
    record.close()
    assert not crashes[0].write("rank 1 is gone", 69)
    status = run_status(path.parent)
    assert (status.state, status.cause) == ("crashed", "rank 1 stopped: ValueError")
    assert (status.exit_code, status.step) == (1, 2)


def test_no_end_is_written_into_an_earlier_session_or_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "events.jsonl"
    session(path)
    time.sleep(0.01)
    assert not Crash(path, 0).write("before its own start", 1)
    assert not Crash(tmp_path / "elsewhere" / "events.jsonl", 1).write("on another machine", 69)
    assert [event["event"] for event in read_events(path)] == ["run_start", "step", "step"]


def test_an_end_after_a_half_written_line_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    crash = Crash(path, 1)
    session(path)
    with path.open("ab") as file:
        file.write(b'{"event":"step","step":3,"ti')
    assert crash.write("rank 0 was killed", 69)
    assert [event["event"] for event in read_events(path)] == ["run_start", "step", "step", "run_end"]


BEAT, SILENCE = 5.0, 60.0


class _Counting:
    """A store that counts requests, keys and bytes."""

    def __init__(self, store: Any) -> None:
        self._store, self.counts = store, Counter[str]()

    def set(self, key: str, value: str) -> None:
        self.counts.update(requests=1, keys=1, bytes=len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        self.counts.update(requests=1, keys=len(keys))
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self.counts.update(requests=1, keys=len(keys), bytes=sum(map(len, values)))
        return values


class _World(World):
    """One of many ranks in one process; rank 0 is made first."""

    said: Any = None

    def from_main(self, value: Any) -> Any:
        """The answer of rank 0."""
        if self.is_main:
            _World.said = value
        return _World.said


class BeatingRanks:
    """All ranks of a world, whose clock the test moves."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, *, machines: int = 1) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda: self.now)
        here, store = Member.here(0), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        size = -(-count // machines)
        members = [replace(here, rank=rank, machine=f"machine {rank // size}") for rank in range(count)]
        self.silent: list[tuple[int, int]] = []
        self.ranks = []
        for rank in range(count):
            world = _World(rank, count, rank, torch.device("cpu"))

            def told(member: Member, by: int = rank) -> None:
                self.silent.append((by, member.rank))

            seconds = {"beat_seconds": BEAT, "silence_seconds": SILENCE}
            self.ranks.append(Heartbeats(world, members, store, told, **seconds))

    def beat(self, number: int, lines: dict[int, str] | None = None, without: tuple[int, ...] = ()) -> None:
        """A beat of all ranks but those; lines: of ranks whose main threads are not in step.py."""
        self.now += BEAT
        for rank, beats in enumerate(self.ranks):
            if rank not in without:
                beats.write(number, (lines or {}).get(rank, "in step.py:7 wait"))
                beats.read()

    def look(self) -> None:
        """Read the survey on every rank, as when a collective has failed on all."""
        for beats in self.ranks:
            beats.read_survey()


def cost(count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The store's traffic for one beat of all ranks, each at a different source line."""
    ranks = BeatingRanks(count, monkeypatch, machines=count // 8)
    lines = {rank: f"in step.py:{rank:04} wait" for rank in range(count)}
    ranks.beat(1, lines)
    counting = [_Counting(beats.store) for beats in ranks.ranks]
    for beats, store in zip(ranks.ranks, counting, strict=True):
        beats.store = store
    ranks.beat(2, lines)
    return sum((store.counts for store in counting), Counter[str]())


def test_a_beat_costs_each_rank_the_same_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (16, 64, 256):
        found, machines = cost(count, monkeypatch), count // 8
        assert found["requests"] == 2 * count + machines + 2  # rank 0 reads all beats, and writes the survey
        assert found["keys"] == 3 * count + machines + 1
        assert found["bytes"] < count * 100 + (machines + 1) * LISTED * 100


def test_ranks_that_are_silent_or_elsewhere_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = BeatingRanks(40, monkeypatch, machines=5)
    for number in range(1, 7):  # rank 0 sees a beat of the others at its own next one
        ranks.beat(number, {7: "in data.py:3 read"}, without=(33,) if number > 2 else ())
    ranks.look()
    ranks.now += 1
    for rank in (0, 1, 39):
        (line,) = ranks.ranks[rank].at_other_lines("in step.py:7 wait")
        assert line.startswith("rank 7 (pid ") and line.endswith("is in data.py:3 read for 21 s")
        assert ranks.ranks[rank].silent_members() == []  # 33 is, for three beats and no more
    ranks.beat(7, {7: "in data.py:3 read"}, without=(33,))
    ranks.look()
    for rank in (0, 1, 39):
        (line,) = ranks.ranks[rank].silent_members()
        assert line.startswith("rank 33 (pid ") and line.endswith("has been silent for 21 s")
    others = ranks.ranks[7].at_other_lines("in data.py:3 read")
    assert len(others) == LISTED - 1 and all("is in step.py:7 wait for" in text for text in others)


def test_of_a_silent_rank_rank_0_speaks_once_and_of_rank_0_one_rank_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = BeatingRanks(8, monkeypatch, machines=4)
    for number in range(1, 20):
        ranks.beat(number, without=(5,) if number > 1 else ())
    assert ranks.silent == [(0, 5)]
    ranks.beat(20)
    for number in range(21, 40):
        ranks.beat(number, without=(5,))
    assert ranks.silent == [(0, 5)] * 2, "it was back, and is silent again"
    ranks.silent.clear()
    for number in range(40, 60):
        ranks.beat(number, without=(0,))
    assert ranks.silent == [(2, 0), (4, 0), (6, 0)]
    ranks.look()
    ranks.now += 3 * BEAT + 1
    ranks.look()
    assert ranks.ranks[3].silent_members()[0].startswith("rank 0 (pid ")
    assert ranks.ranks[1].silent_members(), "on its own machine it is named as well"


def test_a_rank_that_is_done_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = BeatingRanks(4, monkeypatch, machines=4)
    ranks.beat(1)
    ranks.ranks[3].write(LEFT, "at its end")
    for number in range(2, 20):
        ranks.beat(number, without=(3,))
    ranks.ranks[0].write(LEFT, "at its end")
    for number in range(20, 40):
        ranks.beat(number, without=(0, 3))
    assert ranks.silent == []
    assert [ranks.ranks[rank].silent_members() for rank in (1, 2)] == [[], []]
