"""Sweeps: what the file says is checked first, every trial ends once, and whatever is killed is gone on with."""

import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import pytest
import yaml

from config.cli import REPOSITORY
from launch.sweep.events import History
from launch.sweep.file import as_setting, read_sweep
from launch.sweep.folder import Outcome, prepare
from launch.sweep.rule import Hopeless, Report, hopeless_reason
from launch.sweep.slots import slot_environments
from launch.sweep.table import as_markdown, results_of
from launch.sweep.trial import RUN_FOLDER_VARIABLE, command_of
from tests.support.jobs import launches
from tests.support.jobs.launches import BIN, children, events
from tests.support.refusals import refused
from tests.support.runs.compare_runs import start_fields, step_fields
from tracking.jsonl import encode

EXAMPLES = sorted((REPOSITORY / "launch/sweeps").glob("*.yaml"))
DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
RATE = "optimizer.learning_rate"
SLOW, FAST = {RATE: 1e-3, "optimizer.eps": 0.2}, {RATE: 1e-2}
"""A pretended run of 4 s, unless it resumes, and one of no time."""
PRETEND = ["python", str(REPOSITORY / "tests/support/jobs/pretend_trial.py")]


def sweep_file(folder: Path, **keys) -> Path:
    """A sweep of pretended runs of 20 steps; keys of `fixed` are added to what is fixed."""
    fixed = {"run.dir": str(folder / "runs"), "run.steps": 20, "schedule.warmup_steps": 2, "evaluate.every_steps": 10}
    fixed |= keys.pop("fixed", {})
    tree = {"config": DEMO, "name": "it", "launcher": PRETEND, "fixed": fixed, "grid": {RATE: [1e-3, 1e-2]}, **keys}
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in tree.items() if value is not None}))
    return path


def command(*arguments: object, **environment: str) -> list[str]:
    settings = [f"{name}={value}" for name, value in environment.items()]
    return ["env", "-u", "OMP_NUM_THREADS", *settings, sys.executable, "-m", "launch.sweep", *map(str, arguments)]


def finish(*arguments: object, code: int = 0, **environment: str) -> str:
    return launches.finish(command(*arguments, **environment), exit_code=code, seconds=60)


def begun(path: Path, *, saved: bool = True) -> subprocess.Popen[str]:
    """A sweep whose first trial has started, and has saved."""
    sweep = launches.start(command(path))
    launches.wait_until(lambda: starts(path.parent, 0) and (not saved or saved_once(path.parent)))
    return sweep


def saved_once(folder: Path) -> bool:
    return (folder / "runs/it/it-000/checkpoints/step-1").exists()


def results(folder: Path) -> dict:
    return json.loads((folder / "runs/it/results.json").read_text())


def record(folder: Path, index: int) -> dict:
    """The recorded outcome of a trial."""
    return json.loads((folder / f"runs/it/trials/{index:03d}.json").read_text())


def starts(folder: Path, index: int) -> list[dict]:
    path = folder / f"runs/it/it-{index:03d}/starts"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def processes_of(folder: Path) -> list[int]:
    """Every process of a sweep's trials on this machine, seen by its command line or its mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            told = str(folder).encode() in (path / "cmdline").read_bytes()
            marked = f"{RUN_FOLDER_VARIABLE}={folder}".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        if (told or marked) and path.name != str(os.getpid()):
            found.append(int(path.name))
    return found


def test_the_rule_is_viziers_median_stopping_rule():
    """Against the definition in the paper, written out, on random curves with gaps, infinities and ties."""
    draw = random.Random(0)
    seen = set()
    for _ in range(500):
        after_steps, factor, sign = draw.choice([1, 20, 40]), draw.choice([1.0, 1.1]), draw.choice([1, -1])
        rule = Hopeless(after_steps=after_steps, factor=factor, trials=draw.choice([1, 3]))

        def curve(sign: int = sign) -> list[Report]:
            losses = [draw.choice([1.0, 2.0, draw.uniform(1, 3), draw.uniform(1, 3), math.inf]) for _ in range(6)]
            losses = [sign * loss for loss in losses if sign == 1 or loss < math.inf]  # of rewards, negative
            return [Report(10 * (n + 1), loss) for n, loss in enumerate(losses[: draw.randrange(7)])]

        own, others = curve(), [curve() for _ in range(draw.randrange(6))]
        step = own[-1].step if own else 0
        reached = [
            [one.loss for one in other if one.step <= step] for other in others if other and other[-1].step >= step
        ]
        expected = False
        if own and step >= rule.after_steps and len(reached) >= rule.trials:
            middle = median(sum(losses) / len(losses) for losses in reached)
            expected = min(one.loss for one in own) > (factor if sign == 1 else 2 - factor) * middle
        assert (hopeless_reason(own, others, rule) is not None) == expected
        seen.add(expected)
    assert seen == {True, False}


def test_events_are_read_as_they_come_and_the_later_attempt_counts(tmp_path):
    path = tmp_path / "events.jsonl"
    steps = [("step", n, step_fields(n, loss=float(n))) for n in range(1, 9)]
    steps[1] = ("step", 2, step_fields(2, loss=math.nan, applied=False))
    steps[2] = ("step", 3, step_fields(3, loss=0.0) | {"metrics": {"reward/mean": -3.0}})  # followed by its reward
    again = [("step", n, step_fields(n, loss=math.inf if n == 6 else 100.0 + n)) for n in (5, 6)]
    lines = [("run_start", 0, start_fields(world_size=4)), *steps, ("run_end", 8, {"status": "x", "exit_code": 75})]
    lines += [("run_start", 4, start_fields(world_size=2)), *again, ("eval", 6, {"loss": 7.5, "perplexity": None})]
    text = b"".join(encode({"event": kind, "step": step, "time": 1.0, **fields}) for kind, step, fields in lines)
    history = History(path)
    assert not history.refresh()
    for end in range(0, len(text) + 1, 37):
        path.write_bytes(text[:end])
        history.refresh()
    path.write_bytes(text + b'{"event": "step", "st')
    history.refresh()
    assert history.losses == {1: 1.0, 2: None, 3: 3.0, 4: 4.0, 5: 105.0, 6: math.inf}
    assert (history.validation_loss, history.world_size, history.ended, history.steps) == (7.5, 2, None, 6)
    assert history.reports(Hopeless(every_steps=2)) == [Report(2, 1.0), Report(4, 3.5), Report(6, math.inf)]
    assert history.reports(Hopeless(loss="validation")) == [Report(6, 7.5)]


def test_a_seed_that_diverged_is_left_out_of_the_mean_over_seeds(tmp_path):
    plan, _ = prepare(read_sweep(sweep_file(tmp_path, grid=None, seeds=3)))
    for entry, loss in zip(plan.trials, (1.0, 2.0, math.nan), strict=True):
        plan.record(entry, Outcome("done"))
        plan.run_folder(entry).mkdir()
        step = {"event": "step", "step": 1, "time": 1.0, **step_fields(1, loss=loss)}
        (plan.run_folder(entry) / "events.jsonl").write_bytes(encode(step))
    assert "| 2         | 1.5000    | 0.7071 " in as_markdown(results_of(plan))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"grid": {"optimizer.learning_rat": [1]}}, "optimizer.learning_rat: no such key; did you mean optimizer.lea"),
        ({"fixed": {"run.stpes": 3}}, "run.stpes: no such key; did you mean run.steps?"),
        ({"grid": {RATE: [1e-3, "fast"]}}, "optimizer.learning_rate = 'fast' is not a number"),
        ({"grid": {"batch.micro_size": [3]}}, "batch.micro_size=3: "),  # with one process 8 is no multiple of 3
        ({"grid": {RATE: 1e-3}}, "grid: optimizer.learning_rate = 0.001 is not a list of values"),
        ({"grid": {"optimizer": {"eps": [1]}}}, "is a section; write its keys whole: optimizer.eps: [...]"),
        ({"grid": {RATE: [0.001, 1e-3]}}, "two trials are the same run, optimizer.learning_rate=0.001 and"),
        ({"trials": [{RATE: 1}]}, "optimizer.learning_rate is set in two of fixed, grid, trials and seeds"),
        ({"grid": {"run.seed": [1]}, "seeds": 2}, "run.seed is set in two of"),
        ({"grid": {"run.name": ["a", "b"]}}, "run.name: the sweep gives each trial its own"),
        ({"grid": None}, "there is nothing to try; give grid:, trials: or seeds:"),
        ({"stop": {"hopeless": {"after": 3}}}, "stop.hopeless.after: no such key; did you mean"),
        ({"slots": 0}, "slots = 0 is out of range; it must be at least 1"),
        ({"name": "a/b"}, "name = 'a/b' cannot be a folder name"),
        ({"config": "nowhere.yaml"}, "config = 'nowhere.yaml' does not exist"),
        ({"launcher": ["deepspeed"]}, "launcher = 'deepspeed' does not say how many processes it starts; add proc"),
        ({"launcher": "python -m launch.supervise -- torchrun"}, "launch.supervise would restart what the sweep"),
        ({"launcher": "torchrun --nproc_per_node=2", "processes": 3}, "processes = 3, but the launcher says 2"),
    ],
)
def test_a_mistake_names_the_file_the_key_and_what_to_do(tmp_path, keys, message):
    path = sweep_file(tmp_path, **keys)
    said = refused(read_sweep, path)
    assert said.startswith(f"{path}: ") and message in said


def test_a_mistake_in_the_last_trial_stops_the_first_from_starting(tmp_path):
    path = sweep_file(tmp_path, trials=[{RATE: 1e-3}, {RATE: 1e-2}, {"optimizer.lr": 1}], grid=None)
    output = finish(path, code=2)
    assert output.startswith(f"error: {path}: optimizer.lr: no such key") and len(output.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "value", [1e-5, 3, True, None, "never", "1e-3", "", " x", "true", "a: b", [1, "x"], {"a": {"b": 1e-7}}, 'é"\n']
)
def test_a_value_reaches_train_py_as_it_is(value):
    from config.load import _parse_override

    assert _parse_override(f"key={as_setting(value)}") == ("key", value)


def test_trials_are_ranked_priced_and_stopped_when_hopeless(tmp_path):
    """Four of one order of magnitude each; the far one is asked to save and end, by the rule that is stated."""
    trials = [{RATE: 1e-3}, {RATE: 1e-2}, {RATE: 1e-4}, {RATE: 10.0, "optimizer.eps": 0.2}]
    stop = {"hopeless": {"after_steps": 10, "every_steps": 5, "trials": 3}}
    path = sweep_file(tmp_path, trials=trials, grid=None, stop=stop, price_per_device_hour=36.0)
    output = finish(path)
    found = results(tmp_path)
    trials = {trial["trial"]: trial for trial in found["trials"]}
    assert [trial["trial"] for trial in found["trials"]] == [0, 1, 2, 3]
    assert [trials[index]["status"] for index in range(4)] == ["done", "done", "done", "hopeless"]
    assert trials[0]["validation_loss"] == pytest.approx(1.45)
    assert trials[3]["steps"] < 20 and record(tmp_path, 3)["exit_code"] == 75
    assert "by step 10" in trials[3]["reason"] and "the running averages of 3 trials" in trials[3]["reason"]
    hours = sum(record(tmp_path, index)["seconds"] for index in range(4)) / 3600
    assert found["cost"] == pytest.approx(36 * hours) and found["trials_per_money"] == pytest.approx(4 / (36 * hours))
    assert sum(trial["cost"] for trial in trials.values()) == pytest.approx(36 * hours)
    assert "4 of 4 trials ended" in output and "trials per dollar" in output
    assert (tmp_path / "runs/it/sweep.md").read_text() in output


def test_trials_that_are_no_longer_in_the_file_do_not_judge(tmp_path):
    stop = {"hopeless": {"after_steps": 10, "every_steps": 5, "trials": 1}}
    finish(sweep_file(tmp_path, grid={RATE: [1e-3]}))
    finish(sweep_file(tmp_path, grid={RATE: [10.0]}, stop=stop, fixed={"optimizer.eps": 0.1}))
    assert [record(tmp_path, index)["status"] for index in range(2)] == ["done", "done"]


def test_what_has_ended_is_not_repeated_and_what_crashed_goes_on(tmp_path):
    trials = [{"run.hypothesis": how} for how in ("", "late", "diverge")]
    path = sweep_file(tmp_path, trials=trials, grid=None, fixed={RATE: 1e-3})
    finish(path, code=1)
    assert [record(tmp_path, index)["status"] for index in range(3)] == ["done", "crashed", "diverged"]
    output = finish(path)
    assert "2 of 3 trials have ended before and are not repeated" in output
    assert [record(tmp_path, index)["status"] for index in range(3)] == ["done", "done", "diverged"]
    assert [len(starts(tmp_path, index)) for index in range(3)] == [1, 2, 1]
    assert {start["resume"] for index in range(3) for start in starts(tmp_path, index)} == {"auto"}
    assert [trial["rank"] for trial in results(tmp_path)["trials"] if trial["status"] == "diverged"] == [3]


def test_a_launcher_that_ends_with_0_before_its_run_has_not_finished_it(tmp_path):
    path = sweep_file(tmp_path, trials=[{RATE: 1e-3}], grid=None, fixed={"run.hypothesis": "silent"})
    finish(path, code=1)
    told = record(tmp_path, 0)
    assert (told["status"], told["exit_code"]) == ("crashed", 1) and "the run recorded no end" in told["reason"]
    finish(path)
    assert record(tmp_path, 0)["status"] == "done" and len(starts(tmp_path, 0)) == 2


def test_when_all_fail_by_numerics_the_exit_code_says_so(tmp_path):
    finish(sweep_file(tmp_path, fixed={"run.hypothesis": "diverge"}), code=3)


def test_three_failures_before_a_first_step_end_the_sweep(tmp_path):
    path = sweep_file(tmp_path, seeds=3, fixed={"run.hypothesis": "crash"})
    output = finish(path, code=1)
    assert "3 trials in a row failed before their first step" in output
    assert "ValueError: a bug of its own" in record(tmp_path, 2)["reason"]
    assert [len(starts(tmp_path, index)) for index in range(6)] == [1, 1, 1, 0, 0, 0]


def test_slots_run_side_by_side_each_on_its_own_device_port_and_cores(tmp_path):
    path = sweep_file(tmp_path, slots=2, grid=None, trials=[{RATE: 1e-2}], seeds=2, fixed={"optimizer.eps": 0.05})
    output = finish(path, CUDA_VISIBLE_DEVICES="4,6")
    assert "| optimizer.learning_rate=0.01 | 2         | 2.4500    | 0.0000 " in output
    told = [starts(tmp_path, index)[0] for index in (0, 1)]
    assert sorted(one["CUDA_VISIBLE_DEVICES"] for one in told) == ["4", "6"]
    assert told[0]["MASTER_PORT"] != told[1]["MASTER_PORT"]
    assert {one["OMP_NUM_THREADS"] for one in told} == {str(max(1, len(os.sched_getaffinity(0)) // 2))}
    assert abs(told[0]["time"] - told[1]["time"]) < min(record(tmp_path, index)["seconds"] for index in (0, 1))


def test_slots_that_take_more_gpus_than_there_are_are_refused(tmp_path):
    plan, _ = prepare(read_sweep(sweep_file(tmp_path, slots=2, launcher=["torchrun", "--nproc_per_node", 2])))
    assert "2 slots of 2 processes take 4 GPUs and there are 3" in refused(slot_environments, plan, ["0", "1", "2"])
    devices = [told["CUDA_VISIBLE_DEVICES"] for told in slot_environments(plan, ["5", "3", "1", "0"])]
    assert devices == ["5,3", "1,0"]


@pytest.mark.parametrize(
    ("launcher", "on_gpus", "expected"),
    [
        ("deepspeed --num_gpus 2", True, ["deepspeed", "--master_port", "PORT"]),
        ("deepspeed --num_gpus=2 --no_local_rank", False, "deepspeed --master_port PORT --num_gpus=2 --no_local_rank"),
        ("deepspeed --master_port 7 --num_gpus=2", True, "deepspeed --master_port 7"),
        ("torchrun --nproc-per-node 2", True, "torchrun --standalone --nproc-per-node 2"),
        ("accelerate launch --num_processes 2", True, "accelerate launch --main_process_port PORT --num_processes 2"),
    ],
)
def test_a_launcher_gets_a_port_of_its_own_and_the_slots_devices(tmp_path, launcher, on_gpus, expected):
    """deepspeed --num_gpus leaves CUDA_VISIBLE_DEVICES aside; without it, it takes what that names."""
    plan, _ = prepare(read_sweep(sweep_file(tmp_path, launcher=launcher)))
    command = command_of(plan, plan.trials[0], on_gpus=on_gpus)
    words = command[: command.index(str(REPOSITORY / "train.py"))]
    words = ["PORT" if word.isdecimal() and int(word) > 1000 else word for word in words]
    assert words == (expected if isinstance(expected, list) else expected.split())


def test_a_killed_sweep_takes_its_trials_with_it_and_goes_on(tmp_path):
    path = sweep_file(tmp_path, trials=[SLOW, FAST], grid=None, fixed={"run.hypothesis": "leave"})
    sweep = begun(path)
    sweep.kill()
    sweep.communicate(timeout=30)  # the trial holds the pipe until it has gone
    assert record(tmp_path, 0)["status"] == "stopped" and processes_of(tmp_path / "runs") == []
    left = int((tmp_path / "runs/it/it-000/left").read_text())
    assert not Path(f"/proc/{left}").exists()
    finish(path)
    assert [len(starts(tmp_path, index)) for index in (0, 1)] == [2, 1]


def test_what_nobody_is_left_to_end_is_ended_by_the_next_start(tmp_path):
    path = sweep_file(tmp_path, trials=[SLOW, FAST], grid=None, fixed={"run.hypothesis": "deaf"})
    sweep = begun(path)
    for pid in (sweep.pid, children(sweep.pid)[0]):
        os.kill(pid, signal.SIGKILL)
    sweep.wait(timeout=30)
    sweep.stdout.close()
    launches.wait_until(lambda: len(processes_of(tmp_path / "runs")) == 1)  # what was killed needs a moment to end
    assert record(tmp_path, 0)["status"] == "running"
    output = finish(path)
    assert "1 processes of it-000 were left behind by an earlier start" in output
    assert [len(starts(tmp_path, index)) for index in (0, 1)] == [2, 1]


def test_a_trials_own_process_that_is_killed_costs_that_trial_only(tmp_path):
    path = sweep_file(tmp_path, trials=[SLOW | {"optimizer.eps": 20}, FAST], grid=None)
    sweep = begun(path, saved=False)
    os.kill(children(sweep.pid)[0], signal.SIGKILL)
    launches.output_of(sweep, exit_code=1, seconds=60)
    assert [record(tmp_path, index)["status"] for index in (0, 1)] == ["crashed", "done"]
    assert "was killed by SIGKILL" in record(tmp_path, 0)["reason"] and processes_of(tmp_path / "runs") == []


@pytest.mark.parametrize("how", ["", "deaf"])
def test_ctrl_c_saves_and_a_second_one_kills(tmp_path, how):
    path = sweep_file(tmp_path, fixed={"optimizer.eps": 0.3, "run.hypothesis": how})
    sweep = begun(path)
    sweep.send_signal(signal.SIGINT)
    if how == "deaf":
        time.sleep(0.5)
        assert sweep.poll() is None
        sweep.send_signal(signal.SIGINT)
    assert f"to resume: python -m launch.sweep {path}" in launches.output_of(sweep, exit_code=75)
    assert record(tmp_path, 0)["status"] == "stopped" and starts(tmp_path, 1) == []
    assert record(tmp_path, 0)["exit_code"] == (75 if not how else -9)


def test_when_its_minutes_are_up_it_saves_and_can_be_gone_on_with(tmp_path):
    path = sweep_file(tmp_path, minutes=0.03, fixed={"optimizer.eps": 0.3})
    assert "the 0.03 minutes are up" in finish(path, code=75)
    assert record(tmp_path, 0)["status"] == "stopped" and starts(tmp_path, 1) == []


def test_a_start_that_fails_before_it_records_anything_is_not_the_stop_before_it(tmp_path):
    trials = [{RATE: 1e-3, "optimizer.eps": 0.3, "run.hypothesis": "resume"}]
    finish(sweep_file(tmp_path, minutes=0.05, trials=trials, grid=None), code=75)
    assert record(tmp_path, 0)["status"] == "stopped" and saved_once(tmp_path)
    finish(sweep_file(tmp_path, trials=trials, grid=None), code=1)
    assert record(tmp_path, 0)["status"] == "crashed" and record(tmp_path, 0)["exit_code"] == 1
    assert "ValueError: a bug of its own" in record(tmp_path, 0)["reason"]


def test_a_changed_file_adds_trials_and_never_mixes_two_runs(tmp_path):
    finish(sweep_file(tmp_path))
    changed = sweep_file(tmp_path, grid={RATE: [1e-4, 1e-2]})
    output = finish(changed)
    assert "trial 2 (optimizer.learning_rate=0.0001) is new" in output
    assert "trial 0 (optimizer.learning_rate=0.001) is no longer in the file" in output
    assert [trial["trial"] for trial in results(tmp_path)["trials"]] == [1, 2]
    assert [len(starts(tmp_path, index)) for index in range(3)] == [1, 1, 1]
    output = finish(sweep_file(tmp_path, fixed={"optimizer.weight_decay": 0.2}), code=2)
    assert "has begun with optimizer.weight_decay = 0.1, now 0.2" in output


def test_a_sweep_that_is_running_is_not_run_twice(tmp_path):
    path = sweep_file(tmp_path, fixed={"optimizer.eps": 0.3})
    sweep = begun(path, saved=False)
    assert "another process runs this sweep" in finish(path, code=2)
    sweep.send_signal(signal.SIGTERM)
    launches.output_of(sweep, exit_code=75)


def test_a_trial_of_an_array_is_one_command_and_the_report_another(tmp_path):
    plan, _ = prepare(read_sweep(sweep_file(tmp_path)))
    output = finish("--trial", 1, plan.folder, CUDA_VISIBLE_DEVICES="4,6")
    assert "trial 1 (optimizer.learning_rate=0.01) done" in output
    assert starts(tmp_path, 1)[0]["CUDA_VISIBLE_DEVICES"] == "4"
    assert "has the trials 0 to 1" in finish("--trial", 2, plan.folder, code=2)
    finish("--report", plan.folder)
    assert [trial["status"] for trial in results(tmp_path)["trials"]] == ["done", "waiting"]


def test_a_trial_that_is_out_of_time_has_ended(tmp_path):
    path = sweep_file(tmp_path, fixed={"run.max_minutes": 1, "run.hypothesis": "time"})
    assert "it-001 out of time: run.max_minutes is up" in finish(path)
    assert "2 of 2 trials have ended before" in finish(path)
    assert [len(starts(tmp_path, index)) for index in range(2)] == [1, 1]


def test_a_trial_is_out_of_time_also_when_only_another_rank_noticed(tmp_path):
    """Rank 0, which writes the reason, may be a moment behind the rank whose clock ran out first."""
    fixed = {"run.max_minutes": 0.001, "optimizer.eps": 0.3}
    finish(sweep_file(tmp_path, minutes=0.05, fixed=fixed), code=75)
    assert record(tmp_path, 0)["status"] == "out of time" and starts(tmp_path, 1) == []


def test_a_trial_that_torchrun_ends_has_the_exit_code_of_its_rank(tmp_path):
    launcher = ["torchrun", "--nproc_per_node", 1, PRETEND[1]]
    finish(sweep_file(tmp_path, launcher=launcher, grid={RATE: [1e-3]}, fixed={"run.hypothesis": "refuse"}), code=1)
    told = record(tmp_path, 0)
    assert (told["status"], told["reason"], told["exit_code"]) == ("refused", "error: nothing here is right", 2)


@pytest.mark.parametrize("path", [path for path in EXAMPLES if path.stem != "wandb"])
def test_every_example_is_a_sweep_and_its_first_line_runs_it(path):
    assert path.read_text().startswith(f"# python -m launch.sweep launch/sweeps/{path.name}\n")
    assert read_sweep(path).trials


@pytest.mark.slow
def test_a_wandb_agent_forms_a_command_that_train_py_takes(tmp_path, monkeypatch, capfd):
    """The agent's own code runs the command of launch/sweeps/wandb.yaml, with --show-config in the launcher's place."""
    from wandb.wandb_agent import Agent

    sweep = yaml.safe_load((REPOSITORY / "launch/sweeps/wandb.yaml").read_text())
    shell = sweep["command"].index("-c") + 1
    launcher = "python -m launch.supervise --restarts 0 -- deepspeed --num_gpus 2"
    assert launcher in sweep["command"][shell]
    sweep["command"][shell] = sweep["command"][shell].replace(launcher, "python") + " --show-config"
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SWEEP_ID", "s1")
    monkeypatch.setenv("PATH", f"{BIN}:{os.environ['PATH']}")
    for name in ("WANDB_RUN_ID", "WANDB_SWEEP_PARAM_PATH"):
        monkeypatch.setenv(name, "")  # the agent sets it, for good
    monkeypatch.chdir(REPOSITORY)
    agent = Agent(api=None, queue=None, sweep_id="s1")
    agent._sweep_command = sweep["command"]
    values = {RATE: 3.1e-05, "optimizer.weight_decay": 0.0, "optimizer.betas": [0.9, 0.99], "run.seed": 3}
    values |= {"schedule.name": "wsd", "checkpoint.verify_after_save": True}
    args = {key: {"value": value} for key, value in values.items()}
    agent._command_run({"program": sweep["program"], "run_id": "abc123", "args": args})
    assert agent._run_processes["abc123"].wait(timeout=60) == 0
    shown = next(yaml.safe_load_all(capfd.readouterr().out))
    assert shown["run"]["name"] == "sweep-abc123" and shown["tracking"]["wandb"] == "online"
    assert float(shown["optimizer"]["learning_rate"]) == 3.1e-05 and shown["optimizer"]["betas"] == [0.9, 0.99]
    assert shown["checkpoint"]["verify_after_save"] is True and shown["schedule"]["name"] == "wsd"
    assert set(sweep["parameters"]) <= set(values)


def test_the_command_for_slurm_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "it's one"
    folder.mkdir()
    output = finish(sweep_file(folder), "--slurm", "--", "--time=1:00", code=2, PATH="")
    said = next(line for line in output.splitlines() if line.startswith("sweep: sbatch "))
    assert shlex.split(said)[1:4] == ["sbatch", "--array=0,1%1", "--time=1:00"]
    assert shlex.split(said)[-1] == str(folder / "runs/it")
    assert "error: command line: cannot start sbatch" in output


@pytest.mark.slow
def test_killed_by_sigkill_it_takes_its_ranks_with_it_and_goes_on(tmp_path):
    shutil.copytree(REPOSITORY / "data", tmp_path / "text", ignore=shutil.ignore_patterns("__pycache__"))
    given = [*launches.SMALL, f"run.dir={tmp_path}/runs", "run.steps=12", "schedule.warmup_steps=2"]
    given += [f"data.path={tmp_path}/text", f"data.cache_dir={tmp_path}/cache", "precision.compute=fp32"]
    given += ["deepspeed.config=ds_configs/zero2_fp32.json", "batch.global_size=8", "batch.micro_size=2"]
    given += ["evaluate.every_steps=12", "checkpoint.every_steps=2", "tracking.wandb=disabled", "generate.tokens=0"]
    tree = {"config": str(REPOSITORY / "config/recipes/demo.yaml"), "launcher": ["deepspeed", "--num_gpus", 2]}
    tree |= {"fixed": {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in given)}}
    commands = {}
    for name in ("unbroken", "killed"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree | {"name": name, "grid": {"optimizer.learning_rate": [0.01]}}))
        commands[name] = command(path)
    launches.finish(commands["unbroken"], seconds=900)
    sweep, run = launches.start(commands["killed"]), "killed/killed-000"
    made = tmp_path / "runs" / run / "events.jsonl"
    launches.wait_until(lambda: made.is_file() and len(events(tmp_path, run, "step")) >= 4, seconds=300)
    sweep.kill()
    sweep.communicate(timeout=300)  # its trial holds the pipe until it has saved and gone
    assert processes_of(tmp_path) == []
    record = json.loads((tmp_path / "runs/killed/trials/000.json").read_text())
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    launches.finish(commands["killed"], seconds=900)
    starts = events(tmp_path, run, "run_start")
    assert [event["resumed_from"] is not None for event in starts] == [False, True]
    found = [{e["step"]: e["loss"] for e in events(tmp_path, name, "step")} for name in (run, "unbroken/unbroken-000")]
    assert found[0] == found[1] and len(found[0]) == 12
