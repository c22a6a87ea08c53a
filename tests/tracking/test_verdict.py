"""The verdict on a run: real runs of each kind, sound losses of many shapes, and the same word wherever it is read.

tests/support/runs/verdicts/ has the events of runs of config/recipes/demo_fp16.yaml, as their names say, trimmed to the
required fields.
"""

import io
import json
import math
import shlex
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from config.command_line import read_command_line
from config.launcher import as_launched
from config.load import to_dict
from tests.support.runs.compare_runs import start_fields, step_fields
from tests.support.runs.report_runs import report_of
from tests.support.servers.serving import served
from tracking.compare.command import main as compare
from tracking.compare.surviving import read_events
from tracking.console import ConsoleSink
from tracking.prometheus.metrics import Metrics
from tracking.report.page import results
from tracking.run_dir import RunDir
from tracking.serve.library import read_entry
from tracking.status import Status, ended
from tracking.summary import read_run, read_run_folder
from tracking.verdict import FEWEST, TONES, WORDS, Evidence, Verdict, judge
from tracking.watch.command import Watch, once

RECORDED = Path(__file__).parent.parent / "support" / "runs" / "verdicts"
CONFIG: dict[str, Any] = {
    "run": {"name": "demo", "steps": 60},
    "model": {"architecture": "llama", "name_or_path": None},
    "optimizer": {"learning_rate": 3e-3},
    "schedule": {"warmup_steps": 6},
}
ZERO2_FP16 = "ds_configs/zero2_fp16.json"
RESUME = "python train.py --config demo.yaml run.name=demo run.resume=auto"
DONE = ended({"status": "done", "exit_code": 0, "time": 1.0}, 60)


def folder_of(root: Path, kind: str, **config: Any) -> RunDir:
    """A run folder with the recorded events of `kind`."""
    run_dir = RunDir.create(root, kind, fresh=False)
    shutil.copy(RECORDED / f"{kind}.jsonl", run_dir.events)
    run_dir.write_inputs(CONFIG | config, {}, {"resume_command": RESUME})
    return run_dir


def of_losses(losses: Any, status: Status = DONE, **fields: Any) -> Verdict:
    """The verdict on a run with these losses from step 1 on."""
    return judge(evidence_of(losses, **fields), status, config=CONFIG, resume_command=RESUME)


def evidence_of(losses: Any, **fields: Any) -> Evidence:
    evidence = Evidence()
    evidence.add({"event": "run_start", "step": 0, **start_fields()})
    for step, loss in enumerate(losses, 1):
        evidence.add({"event": "step", "step": step, **step_fields(step, loss=float(loss), **fields)})
    return evidence


REAL = {
    "healthy": ("healthy", None, "", "", 0),
    "fp16_overflows": ("healthy", None, "", "", 0),
    "learning_rate_x_1000": ("diverged", 1, "its loss rose from 5.362 (step 1) to 46.6", "learning_rate=3e-4", 2),
    "planted_nan": ("finished with warnings", 20, "SKIP: the step is not finite", "replay runs/nan --step 20", 1),
    "nan_at_24": ("finished with warnings", 24, "SKIP: the step is not finite", "replay runs/nan_at_24 --step 24", 1),
    "aborted": ("failed", 21, "2 steps in a row were skipped", "tools.replay runs/aborted --step 21", 2),
    "sigkill": ("killed", 20, "no process has the run folder", "run.resume=auto", 0),
    "every_step_skipped": ("not learning", 1, "none of its 12 steps was applied", "loss_scale.policy=adaptive", 12),
    "tiny_learning_rate": ("not learning", 1, "its loss has not fallen by 2%", "learning_rate=0.03", 0),
    "rewards_learned": ("healthy", None, "", "", 0),
    "rewards_collapsed": ("not learning", 10, "its reward has not risen beyond its noise", "learning_rate=3e-4", 4),
    # of config/recipes/grpo.yaml: a checker that says 0.25 to all answers; a learning rate of 1e-5
    "rewards_constant": ("not learning", 1, "in 100% of its prompts all answers had one reward", "", 1),
    "rewards_unlearned": ("not learning", 1, "its reward has not risen beyond its noise", "learning_rate=0.03", 0),
}


@pytest.mark.parametrize("kind", REAL)
def test_a_real_run_has_its_verdict(tmp_path: Path, kind: str) -> None:
    word, step, cause, command, warnings = REAL[kind]
    found = read_run_folder(folder_of(tmp_path, kind), kind).verdict
    assert (found.word, found.step, found.warnings) == (word, step, warnings), found.text
    assert found.cause.startswith(cause) and command in found.command and bool(command) == bool(found.command)


def test_an_incident_is_told_with_the_tensor_that_began_it(tmp_path: Path) -> None:
    cause = read_run_folder(folder_of(tmp_path, "nan_at_24"), "nan_at_24").verdict.cause
    assert " nan in the activation of model.layers.1.mlp on rank " in cause


@pytest.mark.parametrize("kind", REAL)
def test_every_reader_shows_the_same_verdict(tmp_path: Path, kind: str) -> None:
    run_dir = folder_of(tmp_path, kind)
    word = REAL[kind][0]
    expected = read_run_folder(run_dir, kind).verdict
    report = report_of(run_dir, resume_command=RESUME).splitlines()
    assert report[2].startswith(f"**{word}**")
    screen = Console(file=io.StringIO(), width=160, color_system=None)
    once(Watch(run_dir), screen)
    assert screen.file.getvalue().splitlines()[0].startswith(f"{kind}  {word}")
    with served(tmp_path) as client:
        tone = TONES[expected.word]
        assert f'<span class="pill {tone}">{word}</span>' in client.page("/")
        page = client.page("/run", key=kind)
        assert f'<div class="note {tone}"><b>{word}</b>' in page and page.index(f"<b>{word}</b>") < page.index("<dl")
        assert f"<b>{word}</b>" in client.page("/run/report", key=kind)


def test_console_dashboard_report_and_comparison_follow_the_reward(tmp_path: Path, capsys: Any) -> None:
    runs = [folder_of(tmp_path, kind) for kind in ("rewards_learned", "rewards_collapsed")]
    stream = io.StringIO()
    sink = ConsoleSink(60, log_every_steps=60, stream=stream)
    for event in read_events(runs[0].events):
        sink.write(event)
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("step 0: validation reward 0.0046, length 5.932")
    assert "  reward  0.9245 from 0.007161  " in lines[-3] and not any("loss" in line for line in lines)
    run, screen = read_run(runs[0].path), Console(file=io.StringIO(), width=160, height=40, color_system=None)
    once(Watch(runs[0]), screen)
    assert "╭─ reward 0.92" in screen.file.getvalue() and "0.8600 at 60" in screen.file.getvalue()
    rows, samples = dict(results(run)), {event["step"]: event["sample"] for event in run.rare_events["eval"]}
    assert rows["training reward"] == "0.0072 -> 0.9245 (best 0.9583 at step 49)"
    assert rows["validation reward"] == "0.0046 -> 0.8600" and "validation reward/mean" not in rows
    assert list(samples) == [0, 15, 30, 45, 60]
    assert samples[60].count(" -> ") == 4 and all(len(text) < 4 * 900 for text in samples.values())
    assert compare([str(run.path) for run in runs]) == 0
    text = capsys.readouterr().out
    assert "training loss (minus the reward) at 138,125 tokens: rewards_learned is best: -0.8" in text


@pytest.mark.parametrize("metrics", [{"reward/mean": "x"}, ["reward/mean"], "reward/mean", {"reward/mean": {}}])
def test_metrics_that_are_damaged_are_passed_over(tmp_path: Path, metrics: Any) -> None:
    run_dir = folder_of(tmp_path, "rewards_learned")
    for event in [event for event in read_events(run_dir.events) if event["event"] in ("step", "eval")][-2:]:
        with run_dir.events.open("a", encoding="utf-8") as file:
            file.write(json.dumps(event | {"metrics": metrics}, separators=(",", ":")) + "\n")
    entry = read_entry(run_dir.path)
    assert (entry.followed, len(entry.facts.rare_events["eval"])) == ("reward", 5)


def of_rewards(rewards: Any, *warnings: str, status: Status = DONE, held_out: Any = (), **metrics: Any) -> Verdict:
    """The verdict on a run with these rewards and early warnings at its end; the loss is about 0."""
    evidence = Evidence()
    evidence.add({"event": "run_start", "step": 0, **start_fields()})
    for step, reward in enumerate(rewards, 1):
        known = {"reward/mean": float(reward), "reward/spread": 0.1, "reward/no_signal": 0.2} | metrics
        evidence.add({"event": "step", "step": step, **step_fields(step, loss=1e-8 * (-1) ** step), "metrics": known})
    for reward in held_out:
        evidence.add({"event": "eval", "step": 1, "loss": -reward, "metrics": {"reward/mean": reward}})
    for signal in warnings:
        evidence.add({"event": "warning", "step": len(rewards), "signal": signal, "reason": f"{signal} is out"})
    return judge(evidence, status, config=CONFIG, resume_command=RESUME)


def test_a_reward_is_judged_and_not_the_loss_beside_it() -> None:
    draw = np.random.default_rng(0)
    rising = np.linspace(0.1, 0.9, 60) + draw.normal(0, 0.03, 60)
    assert of_rewards(rising).word == "healthy"
    assert of_rewards(np.minimum(1, 5 * rising), "no_signal", "answer_entropy").word == "healthy", "all are solved"
    assert of_rewards(rising, "truncated").word == "finished with warnings"
    stuck = of_rewards(0.2 * rising, "truncated", "answer_entropy", **{"reward/spread": 0.4})
    assert stuck.word == "finished with warnings" and stuck.cause.startswith("early warning: answer_entropy is out")
    fell = of_rewards([*rising, *(0.1 + draw.normal(0, 0.03, 30))])
    assert (fell.word, fell.cause.partition(" at step")[0]) == ("diverged", "its reward fell from 0.8075")
    assert fell.step is not None and 55 < fell.step < 70 and "learning_rate=3e-4" in fell.command
    flat = 0.2 + draw.normal(0, 0.03, 60)
    assert of_rewards(flat).word == "not learning" and of_rewards(flat[:30]).word == "healthy", "too soon to say"
    assert of_rewards(flat, held_out=(0.2, 0.6)).word == "healthy", "what counts are held-out prompts, too"
    assert of_rewards(flat, "truncated").cause.endswith("early warning: truncated is out")
    assert "too short to judge its reward" in of_rewards(rising[:9]).cause


def test_a_reward_whose_noise_is_correlated_has_not_diverged() -> None:
    found = []
    for seed in range(30):
        noise = np.random.default_rng(seed).normal(0, 0.044, 100)
        for step in range(1, 100):
            noise[step] += 0.9 * noise[step - 1]
        found.append(of_rewards(0.4 + noise, **{"reward/spread": 0.45}).word)
    assert found.count("diverged") <= 1  # 7 if the noise were taken for white


def test_a_reward_without_signal_is_said_while_the_run_still_trains() -> None:
    running = Status("running", step=60)
    silent = {"reward/no_signal": 1.0, "reward/spread": 0.0}
    assert of_rewards([0.0] * 60, status=running, **silent).word == "not learning"
    assert of_rewards([0.0] * 40, status=running, **silent).word == "running", "sparse rewards take a while"
    assert of_rewards([0.0] * 60, status=running).word == "running", "it may rise yet"


def curves(size: int, seed: int) -> dict[str, np.ndarray]:
    """Losses of sound runs: none of them has diverged."""
    draw, steps = np.random.default_rng(seed), np.arange(size)
    part = steps / size
    falling = 3 + 5 / (1 + steps / 10)
    return {
        "falling": falling + draw.normal(0, 0.05, size),
        "falling, noisy": falling + draw.normal(0, 0.5, size),
        "converged": 2 + draw.normal(0, 0.1, size),
        "converged, noisy": np.abs(2 + draw.normal(0, 0.5, size)),
        "lognormal noise": 1.5 * np.exp(draw.normal(0, 0.5, size)),
        "lognormal noise, wide": np.exp(draw.normal(0, 1, size)),
        "falling a little": 2.3 - 0.02 * part + draw.normal(0, 0.2, size),
        "overfitting in epochs": 2 * 0.7 ** np.floor(part * 5) + draw.normal(0, 0.15, size).clip(-0.2, None),
        "overfitting to nothing": np.maximum(1e-4, 2 * np.exp(-part * 10) * np.exp(draw.normal(0, 0.5, size))),
        "memorised": 1e-3 * np.exp(draw.normal(0, 1, size)),
        "preferences": np.maximum(0.01, 0.69 - 0.35 * part + draw.normal(0, 0.15, size)),
        "mostly zero": np.where(draw.random(size) < 0.7, 0, draw.exponential(0.3, size)),
        "classification": np.exp(-5 * part) * 0.7 + draw.exponential(0.05, size),
        "two kinds of batches": np.where(draw.random(size) < 0.5, 0.3, 3.0) * np.exp(draw.normal(0, 0.3, size)),
        "a cyclic learning rate": 3 - part + 0.25 * np.abs(np.sin(part * 12)) + draw.normal(0, 0.05, size),
        "warmed up again": 2 + 0.2 * part + draw.normal(0, 0.05, size),
        "a spike": falling + np.where(steps == size // 2, 9, 0) + draw.normal(0, 0.05, size),
        "a spike at the end": falling + np.where(steps == size - 1, 9, 0) + draw.normal(0, 0.05, size),
        "a plateau, then falling": np.where(part < 0.5, 6.9, 6.9 - 4 * (part - 0.5)) + draw.normal(0, 0.05, size),
        "another part of the data": np.where(part < 0.5, 2.0, 2.3) + draw.normal(0, 0.1, size),
    }


@pytest.mark.parametrize("kind", curves(10, 0))
def test_a_sound_loss_is_not_called_diverged(kind: str) -> None:
    """2,400 curves in all."""
    found = [
        (size, seed, verdict.text)
        for size in (10, 12, 15, 20, 50, 100, 300, 1000)
        for seed in range(15)
        if (verdict := of_losses(curves(size, seed)[kind])).word == "diverged"
    ]
    assert found == []


def test_a_loss_that_rises_and_stays_up_has_diverged() -> None:
    for size in (30, 60, 300, 5000):
        for seed in range(5):
            draw, steps = np.random.default_rng(seed), np.arange(size)
            part = steps / size
            falling = 3 + 5 / (1 + steps / (size / 20)) + draw.normal(0, 0.05, size)
            for kind, losses in {
                "exploding": np.where(part > 0.3, np.exp(np.minimum(4, (part - 0.3) * 20)) * falling, falling),
                "blown fine-tuning": np.where(part > 0.2, 6.0, 2.0) + draw.normal(0, 0.2, size),
                "back to guessing": np.where(part > 0.5, 7.2, falling) + draw.normal(0, 0.05, size),
            }.items():
                if kind == "back to guessing" and size < 60:
                    continue  # what is lost is less than chance allows among so few
                found = of_losses(losses)
                assert found.word == "diverged" and "the bound" in found.cause, (size, seed, kind, found.text)
                assert found.step is not None and found.step <= 0.8 * size, (size, seed, kind, found.text)


def test_a_running_run_that_diverged_is_not_shown_as_running() -> None:
    found = of_losses([2.0] * 20 + [60.0] * 20, Status("running", step=40))
    assert (found.word, found.over) == ("diverged", False)
    assert of_losses([2.0] * 40, Status("running", step=40)).word == "running"
    assert of_losses([2.0] * 40, Status("silent", "no event for 5m00s", 40)).word == "stalled"
    assert of_losses([2.0] * 40, ended({"status": "preempted", "exit_code": 75, "time": 1.0}, 40)).word == "stopped"


def test_a_killed_run_that_diverged_is_not_told_to_resume() -> None:
    found = of_losses([2.0] * 20 + [60.0] * 20, Status("killed", "its process is gone", 40))
    assert found.word == "killed" and "before that its loss rose" in found.cause and "learning_rate=" in found.command


def test_a_run_that_is_interrupted_at_the_keyboard_is_killed() -> None:
    cause = "rank 0 (pid 7 on a) was interrupted from the keyboard (SIGINT)"
    crashed = ended({"status": "crashed", "exit_code": 130, "time": 1.0, "reason": cause}, 20)
    assert of_losses([3.0] * 20, crashed).text == f"killed since step 20: {cause}"


def test_what_a_rollback_or_a_restart_left_behind_is_forgotten() -> None:
    rolled = evidence_of([3.0] * 30 + [80.0] * 30)
    assert judge(rolled, DONE).word == "diverged"
    for step in range(31, 61):
        rolled.add({"event": "step", "step": step, **step_fields(step, loss=2.9)})
    assert judge(rolled, DONE).word == "healthy"
    restarted = evidence_of([3.0] * 30 + [80.0] * 30)
    restarted.add({"event": "run_start", "step": 30, **start_fields()})
    assert judge(restarted, DONE).word == "healthy"
    for step in range(1, 31):
        restarted.add({"event": "step", "step": step, **step_fields(step, loss=3.0)})
    assert judge(restarted, Status("running", step=30), config=CONFIG).word == "running", "30 steps are too few"


def test_a_spike_that_came_down_again_is_a_warning() -> None:
    found = of_losses([3.0] * 40 + [30.0] * 12 + [2.8] * 40)
    assert found.word == "finished with warnings" and found.step == 38  # its window begins there
    assert "came down again" in found.cause


def test_a_loss_that_explodes_in_its_last_window_is_a_warning() -> None:
    for size, tail in ((10, 7), (100, 5), (200, 10)):
        found = of_losses([*np.geomspace(8, 4, size - tail), *[1000.0] * tail])
        assert (found.word, found.cause) == ("finished with warnings", "its loss rose to 1,000 at its end")


def test_a_short_run_that_exploded_first_is_not_healthy() -> None:
    """Thirty steps at a learning rate of 0.2, a hundred times too high: 6.8, 37, 6.1."""
    found = of_losses([6.8, 20, 37, 25, 14, 9, *np.geomspace(8, 6.1, 24)])
    assert (found.word, found.step) == ("finished with warnings", 1) and "came down again" in found.cause
    assert of_losses(np.geomspace(6.8, 6.1, 30)).word == "healthy"


def test_a_loss_that_is_not_finite_and_applied_has_diverged() -> None:
    found = of_losses([3.0] * 20 + [float("nan")] * 5)
    assert (found.word, found.step) == ("diverged", 21)


@pytest.mark.parametrize("size", [64, 1000, 1049])
def test_a_run_that_learned_within_a_few_steps_is_healthy(size: int) -> None:
    """The windows end with the newest loss, so that the first losses lie in none."""
    assert of_losses(2.0 + 4.9 * np.exp(-np.arange(size))).word == "healthy"


def test_a_validation_loss_that_is_not_finite_is_a_warning() -> None:
    evidence = evidence_of(np.linspace(3.0, 2.0, 60))
    evidence.add({"event": "eval", "step": 30, "loss": 2.5, "perplexity": 12.2})
    assert judge(evidence, DONE).word == "healthy"
    evidence.add({"event": "eval", "step": 60, "loss": math.nan, "perplexity": math.nan})
    found = judge(evidence, DONE)
    assert (found.word, found.step, found.warnings) == ("finished with warnings", 60, 1)
    assert found.cause.startswith("validation loss nan")


def test_a_step_that_a_machine_computed_wrongly_is_a_warning() -> None:
    evidence = evidence_of(np.linspace(3.0, 2.0, 60))
    fields = {"event": "reexecution", "step": 30, "ranks": [1], "hosts": ["node-7"], "why": "the sums differ"}
    evidence.add({**fields, "outcome": "numeric"})
    assert judge(evidence, DONE).word == "healthy"
    evidence.add({**fields, "outcome": "transient"})
    found = judge(evidence, DONE)
    assert (found.word, found.step, found.warnings) == ("finished with warnings", 30, 1)
    assert "a transient fault of the machine on rank 1 (node-7)" in found.cause


def test_a_run_that_skipped_most_of_its_few_steps_is_not_healthy() -> None:
    evidence = evidence_of([6.9] * 10, applied=False)
    for step in (11, 12):
        evidence.add({"event": "step", "step": step, **step_fields(step, loss=6.9)})
    found = judge(evidence, DONE)
    assert (found.word, found.cause) == ("finished with warnings", "10 of 12 steps were skipped, more than 50%")


def test_a_run_too_short_to_judge_says_so() -> None:
    assert "too short to judge" in of_losses([3.0] * (FEWEST - 1)).cause
    assert of_losses([3.0] * FEWEST).cause == ""


def test_updates_that_rounding_lost_are_not_learning_unless_the_loss_falls() -> None:
    still = ended({"status": "done", "exit_code": 0, "time": 1.0, "standstill": "the model hardly moves"}, 60)
    pretrained = {"model": {"name_or_path": "some/model"}}
    assert judge(evidence_of([2.0] * 60), still, config=pretrained).word == "not learning"
    assert judge(evidence_of([2.0] * 60), DONE, config=pretrained).word == "healthy"
    assert judge(evidence_of(np.linspace(3.0, 2.0, 60)), still, config=pretrained).word == "healthy"


def test_a_learning_rate_of_zero_is_not_learning() -> None:
    assert of_losses([2.0] * 20, lr=0.0).word == "not learning"


def test_an_abort_is_not_answered_with_the_command_that_aborts_again() -> None:
    evidence = evidence_of([3.0] * 20)
    replay = "python -m tools.replay runs/demo --step 20"
    evidence.add({"event": "incident", "step": 20, "verdict": "ABORT", "reason": "it broke", "replay": replay})
    end: dict[str, Any] = {"status": "aborted", "exit_code": 3, "time": 1.0, "reason": "it broke"}
    assert judge(evidence, ended(end, 20), config=CONFIG, resume_command=RESUME).command == replay
    end["reason"] = "no loss scale helps; use precision.compute=bf16, or promote these modules"
    found = judge(evidence, ended(end, 20), config=CONFIG, resume_command=RESUME)
    assert found.command == f"{RESUME} precision.compute=bf16"
    for given in (["--deepspeed_config", ZERO2_FP16], [f"deepspeed.config={ZERO2_FP16}"], ["precision.compute=fp16"]):
        words = ["--config", "config/recipes/demo.yaml", "precision.compute=auto", *given]
        config = to_dict(read_command_line(words, as_launched(1)).config)
        command = judge(evidence, ended(end, 20), config=config, resume_command=f"train.py {' '.join(words)}").command
        assert read_command_line(shlex.split(command)[1:], as_launched(1)).compute == "bf16"
    for own in ({"precision": {"path": "manifest"}}, {"deepspeed": {"config": "/mine/zero2_fp16.json"}}):
        assert judge(evidence, ended(end, 20), config=CONFIG | own, resume_command=RESUME).command == replay
    full = ended({"status": "aborted", "exit_code": 74, "time": 1.0, "reason": "the disk is full"}, 20)
    assert judge(evidence, full, config=CONFIG, resume_command=RESUME).command == RESUME


def test_a_diverged_run_goes_on_from_the_last_sound_checkpoint(tmp_path: Path) -> None:
    for step in (10, 20, 50):
        (tmp_path / "checkpoints" / f"step-{step}").mkdir(parents=True)
    evidence = evidence_of([4.0] * 15 + [3.0] * 15 + [90.0] * 30)
    found = judge(evidence, DONE, folder=tmp_path, config=CONFIG, resume_command=RESUME)
    assert f"run.resume={tmp_path}/checkpoints/step-20" in found.command and "run.name=demo-again" in found.command
    assert found.command.count("run.resume=") == found.command.count("run.name=") == 1


def test_the_evidence_of_a_long_run_stays_small_and_gives_the_same_verdict() -> None:
    losses = 3 + np.random.default_rng(0).normal(0, 0.1, 30_000)
    losses[24_000:] += 6
    evidence = evidence_of(losses)
    steps, kept = evidence.curve()
    assert len(steps) == len(kept) <= 4096 and judge(evidence, DONE).word == "diverged"
    assert judge(evidence, DONE).step == pytest.approx(24_000, rel=0.05)


def test_prometheus_has_one_verdict_at_a_time() -> None:
    metrics = Metrics("demo", planned_steps=60, facts={"host": "a", "scheduler_job": ""})
    events = [event for event in read_events(RECORDED / "healthy.jsonl") if event["event"] in ("run_start", "run_end")]

    def current() -> list[str]:
        return [
            word
            for word in WORDS
            if metrics.registry.get_sample_value("mantissa_verdict", {"run": "demo", "word": word})
        ]

    metrics.update(events[0])
    assert current() == ["running"]
    metrics.update(events[-1] | {"verdict": "diverged"})
    assert current() == ["diverged"]
