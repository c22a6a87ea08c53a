"""A job is started again when, and only when, that helps, with those of its machines that answer.

Programs stand in for ssh and deepspeed; tests/machines/test_kills.py and test_two_machines.py have real ones.
"""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.schema import BatchSection, Config, ParallelSection, RunSection
from launch.hosts import Hosts, most_that_fit, selected
from launch.supervise import Run, Session
from tests.support.jobs import launches
from tests.support.jobs.launches import BIN, output_of
from tests.support.runs.compare_runs import start_fields
from tests.support.runs.long_record import STEPS, peak_memory, write_long_record
from tracking.jsonl import encode

DIED = {"exit": 1, "steps": 3, "saved": 2}
DONE = {"exit": 0, "steps": 6, "end": [0, ""]}
ASKED_TO_STOP = {"exit": 75, "steps": 3, "end": [75, "asked to stop by SIGTERM or SIGUSR1"]}
UNTIL_ASKED = {**ASKED_TO_STOP, "wait": True}


def pretended(folder, *plan, options=(), overrides=(), program=("python",), environment=()):
    """A supervised job that does what `plan` says."""
    job = [*program, f"{REPOSITORY}/tests/support/jobs/pretend_train.py", "--config", "config/recipes/demo.yaml"]
    job += [f"run.dir={folder}", "run.name=it", *overrides]  # the recipe says run.resume: never
    command = [sys.executable, "-m", "launch.supervise", "--wait", "0.1", *options, "--", *job]
    return launches.start(["env", f"PRETEND={json.dumps(plan)}", *environment, *command])


def ended(folder, *plan, code, count, seconds=30, **given):
    """The output of a job that ended with this exit code after this many starts."""
    output = output_of(pretended(folder, *plan, **given), exit_code=code, seconds=seconds)
    assert len(starts(folder)) == count
    return output


def asked_to_stop(job, folder, number=signal.SIGTERM):
    """The output of a job that is sent a signal once it has begun, and ends by itself."""
    launches.wait_until((folder / "it" / "events.jsonl").is_file)
    time.sleep(0.2)  # until its helper is there
    job.send_signal(number)
    return output_of(job, exit_code=75)


def starts(folder):
    """How each start was told to resume."""
    path = folder / "it" / "starts"
    return [line.split()[-1] for line in path.read_text().splitlines()] if path.is_file() else []


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"exit": 0, "steps": 3, "end": [0, ""]}, 0),
        ({"exit": 1, "steps": 3, "end": [0, ""]}, 1),  # done, then failed to write its report
        ({"exit": 2}, 2),
        ({"exit": 1, "steps": 3, "end": [3, "nan"]}, 3),  # torchrun makes 1 of everything
        ({"exit": 1, "steps": 3, "end": [74, "full"]}, 74),
        ({"exit": 1, "steps": 3, "end": [75, "run.max_minutes is up"]}, 75),
    ],
)
def test_what_has_ended_is_not_started_again(tmp_path, told, code):
    ended(tmp_path, told, code=code, count=1)


def test_a_run_whose_time_is_up_ends_with_the_given_exit_code(tmp_path):
    told = {"exit": 75, "steps": 3, "end": [75, "run.max_minutes is up"]}
    ended(tmp_path, told, options=["--time-up-code", "0"], code=0, count=1)


def test_the_time_is_up_also_when_only_another_rank_noticed(tmp_path):
    """Rank 0, which writes the record, may be a moment behind the rank whose clock ran out first."""
    told = {"exit": 75, "steps": 3, "end": [75, "another rank was asked to stop by SIGTERM or SIGUSR1"]}
    ended(tmp_path, told, overrides=["run.max_minutes=1e-7"], code=75, count=1)


@pytest.mark.parametrize("first", [DIED, ASKED_TO_STOP])
def test_what_died_is_started_again_and_its_end_is_ours(tmp_path, first):
    output = ended(tmp_path, first, {"exit": 1, "steps": 6, "end": [3, "nan"]}, code=3, count=2)
    assert "restart 1 of 5 in 0.1 s" in output
    assert starts(tmp_path) == ["never", "auto" if first.get("saved") else "never"]


@pytest.mark.parametrize(("then", "code", "count"), [(DONE, 0, 3), ({"exit": 2}, 2, 3)])
def test_a_start_refused_after_one_that_trained_is_tried_again(tmp_path, then, code, count):
    """A store or a hub that is down is the reason, not the config."""
    ended(tmp_path, DIED, {"exit": 2}, then, code=code, count=count)


def test_a_job_that_gets_no_further_is_given_up(tmp_path):
    output = ended(tmp_path, DIED, code=1, count=3)
    assert "2 starts in a row did not get beyond step 3: giving up" in output.splitlines()[-1]


def test_restarts_are_bounded_also_when_each_gets_further(tmp_path):
    plan = [{"exit": 1, "steps": step} for step in range(1, 9)]
    output = ended(tmp_path, *plan, options=["--restarts", "3"], code=1, count=4)
    assert "given up after 3 restarts within 60 minutes" in output.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "program"),
    [
        (signal.SIGTERM, ["python"]),
        (signal.SIGUSR1, ["nice", "python", "-u", "-X", "dev"]),
        (signal.SIGINT, ["sh", "-c", '"$@"; exit $?', "sh", "python"]),
    ],
)
def test_a_signal_to_the_supervisor_saves_and_ends_the_run(tmp_path, number, program):
    """A run without a launcher, and not its helper: wandb's service inherits the RANK that the run gave itself."""
    options = ["--time-up-code", "0"]
    job = pretended(tmp_path, {**UNTIL_ASKED, "exit": 1, "helper": True}, options=options, program=program)
    assert f"{number.name}: the run is asked to save and end" in asked_to_stop(job, tmp_path, number)
    assert len(starts(tmp_path)) == 1


def test_a_stop_before_the_first_step_leaves_a_job_that_can_be_started_again(tmp_path):
    """A rank has no handler before its model is built: the signal ends it."""
    job = pretended(tmp_path, {"exit": 0, "wait": True, "deadly": True})
    asked_to_stop(job, tmp_path)
    assert len(starts(tmp_path)) == 1


def test_a_second_signal_kills(tmp_path):
    job = pretended(tmp_path, {"exit": 0, "steps": 3, "wait": True})
    launches.wait_until((tmp_path / "it" / "events.jsonl").is_file)
    time.sleep(0.2)
    pid = int(subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True))
    os.kill(pid, signal.SIGSTOP)  # so that it does not see the first one
    job.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    assert "SIGTERM: the job is killed" in output_of(job, exit_code=1)
    assert len(starts(tmp_path)) == 1


def test_a_process_that_outlives_its_launcher_is_ended_before_the_next_start(tmp_path):
    ended(tmp_path, {**DIED, "leave": True}, DONE, code=0, count=2)
    assert not Path(f"/proc/{(tmp_path / 'it' / 'left').read_text()}").exists()


def test_a_rank_that_the_launcher_ends_is_gone_at_once_with_its_children(tmp_path):
    """An orphan that this supervisor adopts and does not reap would keep DeepSpeed's launcher waiting for 30 s."""
    ended(tmp_path, {"exit": 0, "terminate": True, "end": [0, ""]}, code=0, count=1, seconds=90)
    assert float((tmp_path / "it" / "terminated").read_text()) < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "torchrun"], "no train.py after --"),
        (["--", "nowhere", "train.py"], "--config FILE is missing; for example"),
        (["--", "nowhere", "train.py", "--config", "config/recipes/demo.yaml"], "cannot start nowhere"),
        (["--", "torchrun", "train.py", "--config", "config/recipes/demo.yaml", "run.stpes=3"], "did you mean"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    command = [sys.executable, "-m", "launch.supervise", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and len(done.stderr.splitlines()) == 1


# Runs the command here, unless the machine's name is in the file `down`.
SSH = """#!/bin/sh
while [ "$1" != "${1#-}" ]; do case $1 in -o|-p) shift;; esac; shift; done
grep -qx "$1" FOLDER/down && exit 255
exec sh -c "$2"
"""
# Writes down its own words and the hostfile, and starts what it is to start, here.
DEEPSPEED = """#!/bin/sh
while [ "${1%.py}" = "$1" ]; do
    [ "$1" = --hostfile ] && tr '\\n' ' ' <"$2" >>FOLDER/started
    [ "$1" = --force_multi ] && printf '%s ' "$1" >>FOLDER/started
    shift
done
echo >>FOLDER/started
[ -f FOLDER/next_down ] && mv FOLDER/next_down FOLDER/down
exec python "$@"
"""


class Bench:
    """A folder with a hostfile of three machines and the two programs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        for name, text in {"ssh": SSH, "deepspeed": DEEPSPEED}.items():
            (folder / "bin" / name).write_text(text.replace("FOLDER", str(folder)))
            (folder / "bin" / name).chmod(0o755)
        (folder / "hosts").write_text("a slots=2\nb slots=2\nc slots=2\n")
        self.down("")

    def down(self, *names: str, when: str = "down") -> None:
        """Machines that do not answer from now on, or from the next start on."""
        (self.folder / when).write_text("".join(f"{name}\n" for name in names))

    def start(self, *plan: dict, options=("--min-nodes", "1"), launcher=()) -> subprocess.Popen[str]:
        """The supervised job; every process of the real run would make micro-batches of 2 of a batch of 16."""
        # RANK: as if what is started were the rank
        environment = (f"PATH={self.folder}/bin:{BIN}:{os.environ['PATH']}", "RANK=0", "LOCAL_RANK=0")
        program = ("deepspeed", "--hostfile", f"{self.folder}/hosts", *launcher)
        batch = ("batch.global_size=16", "batch.micro_size=2")
        return pretended(self.folder, *plan, options=options, overrides=batch, program=program, environment=environment)

    def ended(self, *plan: dict, code: int, **given: tuple[str, ...]) -> str:
        """The output of a supervised job that ended with this exit code."""
        return output_of(self.start(*plan, **given), exit_code=code)

    def started(self) -> list[str]:
        """The hosts of each start."""
        return [line.strip() for line in (self.folder / "started").read_text().splitlines()]


@pytest.fixture
def bench(tmp_path):
    return Bench(tmp_path)


def test_a_restart_leaves_out_what_does_not_answer_and_takes_it_back(bench):
    """On three machines four processes fit the batch, six do not: 16 is no multiple of 2 x 6."""
    bench.down("b", "c", when="next_down")
    output = bench.ended(DIED, DONE, code=0)
    assert bench.started() == ["a slots=2 b slots=2", "a slots=2 --force_multi"]
    assert "2 of 3 machines: c left out, since batch.global_size does not divide among more processes" in output
    assert "1 of 3 machines: no answer over ssh from b, c; continues with 2 processes, same global batch" in output


def test_too_few_machines_are_waited_for_up_to_a_limit(bench):
    bench.down("a", "c", when="next_down")
    output = bench.ended(DIED, options=("--min-nodes", "2", "--wait-nodes", "0.01"), code=1)
    assert len(bench.started()) == 1
    lines = output.splitlines()
    assert lines[-2].endswith("2 are needed (--min-nodes): waiting for up to 0.01 minutes (--wait-nodes)")
    assert lines[-1].endswith("given up after 0.01 minutes (--wait-nodes)")


@pytest.mark.parametrize("selection", [("--num_nodes", "2"), ("--exclude=c",), ("--include", "a@b")])
def test_a_restart_needs_what_the_launchers_options_select(bench, selection):
    """The launcher does not use c, which is down, and six processes would not fit the batch."""
    bench.down("c")
    bench.ended(DIED, DONE, options=("--wait-nodes", "0.02"), launcher=selection, code=0)
    assert len(bench.started()) == 2


@pytest.mark.parametrize("options", [(), ("--min-nodes", "1")])
def test_the_job_of_one_machine_runs_here_whether_or_not_ssh_reaches_that_name(bench, options):
    (bench.folder / "hosts").write_text("a slots=2\n")
    bench.down("a")
    job = bench.start(DIED, UNTIL_ASKED, options=options)
    launches.wait_until(lambda: len(starts(bench.folder)) == 2)
    asked_to_stop(job, bench.folder)


def test_one_machine_with_force_multi_is_reached_over_ssh(bench):
    bench.down("a", "b", "c")
    given = {"options": ("--wait-nodes", "0.01"), "launcher": ("--num_nodes=1", "--force_multi")}
    assert "no answer over ssh from a" in bench.ended(DIED, code=1, **given)


def test_without_ssh_the_ranks_are_those_of_this_machine(bench):
    bench.down("a", "b", "c")
    job = bench.start(UNTIL_ASKED, options=(), launcher=("--no_ssh", "--node_rank", "0"))
    asked_to_stop(job, bench.folder)


@pytest.mark.parametrize(
    ("options", "launcher", "message"),
    [
        (("--min-nodes", "2"), (), "--min-nodes 2: 1 of 3 machines: no answer over ssh from a, b\n"),
        (("--min-nodes", "4"), (), "--min-nodes 4: the hostfile has 3"),
        (("--min-nodes", "1"), ("--include", "a"), "--min-nodes: --include selects the machines already"),
        ((), ("--hostfile", "/nowhere"), "/nowhere: cannot be read"),
    ],
)
def test_a_mistake_in_hosts_is_one_line_and_exit_code_2(bench, options, launcher, message):
    bench.down("a", "b")
    output = bench.ended(DIED, options=options, launcher=launcher, code=2)
    assert output.startswith("error: ") and message in output and len(output.splitlines()) == 1


def test_a_signal_reaches_rank_0_over_ssh(bench):
    job = bench.start(UNTIL_ASKED, options=())
    assert "SIGTERM: the run is asked to save and end" in asked_to_stop(job, bench.folder)


def test_only_the_jobs_own_processes_are_ended(bench, monkeypatch):
    monkeypatch.setenv("PATH", f"{bench.folder}/bin:{os.environ['PATH']}")
    mine, other = (Hosts.of_command(["deepspeed", f"--hostfile={bench.folder}/hosts", "train.py"]) for _ in range(2))
    assert mine is not None and other is not None
    sleepers = [subprocess.Popen(["sleep", "100"], env=hosts.environment()) for hosts in (mine, other)]
    try:
        mine.end_processes(["a"])
        assert sleepers[0].wait(timeout=5) == -signal.SIGTERM
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


def test_the_largest_number_of_machines_that_fits():
    slots = {"a": 4, "b": 4, "c": 2}
    assert most_that_fit(["a", "b", "c"], slots, lambda processes: 16 % processes == 0) == ["a", "b"]
    assert most_that_fit(["c", "a"], slots, lambda processes: 16 % processes == 0) == ["c"]
    assert most_that_fit(["c", "a"], slots, lambda processes: processes == 7) == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--num_nodes 2", {"a": 4, "b": 4}),
        ("--num_nodes=0 --num_gpus 1", {"a": 1, "b": 1, "c": 1}),
        ("--include a:0,2@c", {"a": 2, "c": 2}),
        ("--include b:0,1@b:1,2", {"b": 3}),
        ("-i b@b:1@c", {"b": 1, "c": 2}),
        ("-e b@a:1", {"a": 3, "c": 2}),
        ("--exclude a:0,0@b:1@b:1,2", {"a": 3, "b": 2, "c": 2}),
        ("--master_addr x", {"a": 4, "b": 4, "c": 2}),
    ],
)
def test_a_launchers_options_select_machines_and_processes(words, expected):
    """DeepSpeed's own functions select the same."""
    from deepspeed.launcher import runner

    slots = {"a": 4, "b": 4, "c": 2}
    options = runner.parse_args([*words.split(), "train.py"])
    kept = runner.parse_inclusion_exclusion(slots, options.include, options.exclude)
    kept = runner.apply_num_nodes_and_gpus(kept, options.num_nodes, options.num_gpus)
    assert selected(slots, ["deepspeed", *words.split()]) == expected == {name: len(ids) for name, ids in kept.items()}


def test_ranks_that_share_sequences_are_restarted_in_whole_groups():
    run = Run(Config(batch=BatchSection(8, 2), parallel=ParallelSection(sequence=2)))
    assert [number for number in range(1, 9) if run.fits(number)] == [2, 4, 8]


def test_the_events_of_a_long_run_are_not_held_to_restart_it(tmp_path):
    run = Run(Config(run=RunSection(dir=str(tmp_path), name="it")))
    run.events.parent.mkdir()
    size = write_long_record(run.events)
    run.session_since((0, 0))  # imports what it needs
    with peak_memory() as peak:
        session = run.session_since((0, 0))
    assert session == Session(STEPS, STEPS - 1, 75, "max_minutes", float(STEPS))
    assert peak[0] < size / 4


def test_a_checkpoint_that_awaits_its_upload_counts_as_saved(tmp_path):
    """One of an earlier session, or fetched from the store, does not."""
    run = Run(Config(run=RunSection(dir=str(tmp_path), name="it")))
    run.events.parent.mkdir()
    start = {"event": "run_start", "step": 0, "tokens": 0, "time": 1.7e9, **start_fields()}
    run.events.write_bytes(encode(start))
    for step, moment in ((2, 1.7e9 - 1), (4, 1.7e9 + 1)):
        folder = run.events.parent / f"checkpoints/step-{step}"
        folder.mkdir(parents=True)
        assert run.session_since((0, 0)).saved == -1
        written = datetime.fromtimestamp(moment, UTC).isoformat(timespec="milliseconds")
        (folder / "manifest.json").write_text(json.dumps({"step": step, "written": written}))
    assert run.session_since((0, 0)).saved == 4
    assert run.session_since(run.events_end()).saved == -1


def test_a_launcher_that_hangs_after_a_rank_was_lost_is_ended():
    line = "left: error: rank 1 (pid 7 on right) is out of reach; rank 0 stops, exit code 69"
    shell = f"echo '{line}'; exec sleep 100"
    program = (  # in a process of its own, since a job ends all that comes of it
        "from launch import job; job.LINGER_SECONDS = 0.5\n"
        f"it = job.Job(['sh', '-c', {shell!r}])\n"
        "print(it.wait(), it.failure_cause())"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False
    )
    assert done.stdout.splitlines() == [line, f"{-signal.SIGKILL} rank 1 (pid 7 on right) is out of reach"], done
    assert "the launcher still waits" in done.stderr
