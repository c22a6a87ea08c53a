"""compare names the step at which two runs diverge and why, which run is better, and why runs are not comparable."""

import json
import math
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.refusals import refused
from tests.support.runs.compare_runs import CONFIG, SCALE, TOKENS_PER_STEP, RunWriter, write_run
from tests.support.runs.report_runs import session
from tracking.compare.command import main
from tracking.compare.divergence import Tolerance, find_divergence
from tracking.compare.html import page
from tracking.compare.measures import loss_at, measures
from tracking.compare.result import Comparison, compare
from tracking.compare.sources import labels, read_runs
from tracking.compare.text import comparable
from tracking.run_dir import RunDir

SECRET = "hunter2hunter2"

_FAULT = {"event": "fault", "kind": "inf_gradient", "rank": 0, "module": "model.up_proj"}
_INF = {"event": "nonfinite", "rank": 1, "module": "model.up_proj", "tensor": "gradient", "kind": "inf", "count": 3}
_SCALE = {"event": "scale", "from": 65536.0, "to": 32768.0, "reason": "overflow", **SCALE}


def _incident(verdict: str, **fields: Any) -> dict[str, Any]:
    common = {"verdict": verdict, "reason": "2 steps in a row", "modules": ["model.up_proj"], "replay": "python -m x"}
    return {"event": "incident", **common, **fields}


def _from(step: int, **fields: Any) -> Any:
    return lambda at, _: fields if at >= step else None


def _only(step: int, **fields: Any) -> Any:
    return lambda at, _: fields if at == step else None


def _reordered(step: int) -> Any:
    """A run that reads other sequences from `step` on, which the baseline never sees."""
    return lambda at, _: {"sample_ids_sha256": f"{at + 900:064x}"[::-1], "loss": 9.0} if at >= step else None


def _compared(*folders: Any, tolerance: Tolerance | None = None, price: float | None = None) -> Comparison:
    runs = read_runs([str(folder.path) for folder in folders])
    return compare(runs, tolerance=tolerance or Tolerance(), price=price)


PLANTED: dict[str, tuple[int, dict[str, Any]]] = {
    "the data order differs from step 20: no recorded setting explains it": (20, {"change": _reordered(20)}),
    "the data order differs from step 1, and so do the initial weights: run.seed 0 / 1": (
        1,
        {"change": _reordered(1), "config": {"run.seed": 1}},
    ),
    "rolled back and skipped batches; what run sees at step 20, base sees at step 24": (
        20,
        {
            "change": lambda at, _: {"sample_ids_sha256": f"{at + 4:04x}" * 16, "loss": 9.0} if at >= 20 else None,
            "after": {19: [_incident("ROLLBACK", at=22, rolled_back_to="checkpoints/step-19", position=23)]},
        },
    ),
    "step 21: model.up_proj promoted to fp32 in run only": (
        22,
        {"change": _from(22, loss=4.0), "after": {21: [_incident("PROMOTE", promoted_to="fp32")]}},
    ),
    "step 21: the learning rate was cut in run only": (
        22,
        {"change": _from(22, lr=1e-9), "after": {21: [_incident("CUT_LR")]}},
    ),
    "step 20 was skipped in run and applied in base: 3 inf in the gradient of model.up_proj on rank 1; loss": (
        20,
        {"change": _only(20, applied=False, grad_norm=math.inf), "after": {20: [_INF, _SCALE]}},
    ),
    "step 20: an injected fault (loss_spike) in model.up_proj in run only": (
        20,
        {"change": _only(20, loss=99.0), "after": {19: [{**_FAULT, "at": 20, "kind": "loss_spike"}]}},
    ),
    "the loss scale differs from step 1 (65536 / 4096): precision.loss_scale.initial - / 4096": (
        1,
        {"change": _from(1, loss_scale=4096.0), "config": {"precision.loss_scale.initial": 4096.0}},
    ),
    "the learning rate differs from step 11 (3e-4 / 1e-9): schedule.warmup_steps - / 11": (
        11,
        {"change": _from(11, lr=1e-9), "config": {"schedule.warmup_steps": 11}},
    ),
    "the number of tokens differs from step 1: batch.global_size 8 / 16": (
        1,
        {"change": lambda step, _: {"tokens": step * 2 * TOKENS_PER_STEP}, "config": {"batch.global_size": 16}},
    ),
    "different from the first step: precision.compute bf16 / fp16": (
        1,
        {"change": lambda at, _: {"loss": 8.0 / at}, "config": {"precision.compute": "fp16", "run.hypothesis": "h"}},
    ),
    "same batch and loss at step 5, but a different gradient: precision.reduce - / compute": (
        5,
        {"change": _from(5, grad_norm=7.0), "config": {"precision.reduce": "compute"}},
    ),
    "before step 2, but a different update: optimizer.weight_decay - / 0.5": (
        2,
        {"change": _from(2, loss=4.0), "config": {"optimizer.weight_decay": 0.5}},
    ),
    "nothing recorded before step 2 explains it; what differs: torch 2.13.0 / 2.14.0": (
        2,
        {"change": _from(2, loss=4.0), "environment": {"versions.torch": "2.14.0"}},
    ),
    "so some of the computation is not deterministic": (30, {"change": _from(30, loss=4.0)}),
}
"""Part of the cause that is given, to the step at which the runs diverge and what is planted there."""


@pytest.mark.parametrize("cause", PLANTED)
def test_the_step_and_the_cause_of_a_planted_divergence_are_named(tmp_path: Path, cause: str) -> None:
    step, planted = PLANTED[cause]
    pair = _compared(write_run(tmp_path, "base"), write_run(tmp_path, "run", **planted)).pairs[0]
    assert pair.divergence.step == step, pair.headline
    assert cause in pair.cause
    assert pair.divergence.identical_to == (step - 1 or None)


def test_a_fault_that_struck_both_runs_is_no_cause(tmp_path: Path) -> None:
    """Both runs skip steps 20 and 21 alike; what one of them did about it is why they diverge."""
    skip = {"applied": False, "grad_norm": math.inf}
    both = {20: [_FAULT, _INF], 21: [_FAULT, _INF]}
    one = {**both, 21: [_FAULT, _INF, _incident("PROMOTE", promoted_to="bf16")]}

    def change(step: int, _: dict[str, Any]) -> dict[str, Any] | None:
        return skip if step in (20, 21) else None

    def promoted(step: int, _: dict[str, Any]) -> dict[str, Any] | None:
        return {"loss": 4.0} if step >= 22 else change(step, _)

    base = write_run(tmp_path, "base", change=change, after=both)
    pair = _compared(base, write_run(tmp_path, "run", change=promoted, after=one)).pairs[0]
    assert (pair.divergence.step, pair.cause) == (22, "step 21: model.up_proj promoted to bf16 in run only")
    nearby = [(label, event["event"], event["step"]) for label, event in pair.divergence.events]
    assert ("run", "incident", 21) in nearby and ("base", "fault", 20) in nearby


def test_a_resume_that_changes_the_numbers_is_named(tmp_path: Path) -> None:
    base = write_run(tmp_path, "base")
    writer = RunWriter(tmp_path, "run")
    writer.run_dir.write_inputs(CONFIG, {}, {})
    writer.start()
    writer.steps(1, 13)
    writer.time += 3600
    writer.start(step=10, resumed_from="checkpoints/step-10", world_size=4)
    writer.steps(11, 40, loss=3.5)
    pair = _compared(base, writer.end()).pairs[0]
    assert (pair.divergence.step, pair.cause) == (11, "run was resumed after step 10, with 4 processes")
    assert any(event["event"] == "run_start" for _, event in pair.divergence.events)


def test_identical_runs_of_different_speed(tmp_path: Path) -> None:
    """A data loader that is late changes no number; where the wait was recorded it is named."""
    base = write_run(tmp_path, "base", change=_from(1, data_seconds=0.01))
    late = write_run(tmp_path, "late", change=_from(1, step_seconds=1.0, data_seconds=0.5))
    comparison = _compared(base, late, tolerance=Tolerance(0.0))
    pair = comparison.pairs[0]
    assert pair.headline == "identical to step 40, the last that both have"
    assert pair.cause.startswith(
        "same numbers to step 40, slower: 1 s per step, baseline 0.5 s; data wait 0.5 s, baseline 0.01 s"
    )
    assert "most of the difference" in pair.cause and comparison.caveats == [] and comparison.within_tolerance


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.floats(1.0, 3.0), st.sampled_from([0.0, 0.0, 1e-12, 0.004, 0.02, 0.5, math.nan, math.inf])),
        min_size=1,
        max_size=30,
    ),
    st.floats(0.0, 0.1),
    st.floats(0.0, 0.1),
)
def test_both_steps_are_those_that_a_plain_loop_finds(tmp_path_factory, losses, relative, absolute) -> None:
    folder = tmp_path_factory.mktemp("runs")
    a, b = [first for first, _ in losses], [first + add for first, add in losses]
    runs = []
    for name, column in (("a", a), ("b", b)):
        writer = RunWriter(folder, name)
        writer.start()
        for step, loss in enumerate(column, start=1):
            writer.step(step, loss=loss)
        runs.append(str(writer.end().path))
    divergence = find_divergence(*read_runs(runs), Tolerance(relative, absolute))
    exact = beyond = None
    for step, (x, y) in enumerate(zip(a, b, strict=True), 1):
        if exact is None and x != y:
            exact = step
        if beyond is None and (not math.isfinite(y) or abs(x - y) > max(absolute, relative * abs(x))):
            beyond = step
    assert (divergence.step, divergence.beyond_tolerance) == (exact, beyond)


def test_what_differs_is_listed_side_by_side_and_nothing_else(tmp_path: Path) -> None:
    base = write_run(tmp_path, "base")
    changed = {"optimizer.learning_rate": 1e-3, "data.path": f"https://me:{SECRET}@host/x", "hub_token": SECRET}
    machine = {"versions.torch": "2.14.0", "hostname": "node8", "git.commit": "f" * 16}
    comparison = _compared(base, write_run(tmp_path, "run", config=changed, environment=machine))
    assert {item.key: item.values for item in comparison.differences} == {
        "optimizer.learning_rate": (3e-4, 1e-3),
        "data.path": (None, "https://***@host/x"),
        "hub_token": (None, "***"),
        "torch": ("2.13.0", "2.14.0"),
        "hostname": ("node7", "node8"),
        "git commit": ("0123456789ab", "f" * 12),
    }


def test_data_order_tokens_and_a_missing_config_are_caveats_too(tmp_path: Path) -> None:
    base = write_run(tmp_path, "base")
    other = write_run(tmp_path, "run", steps=30, change=_from(5, sample_ids_sha256="ff" * 32))
    other.config.unlink()
    assert _compared(base, other).caveats == [
        "different data order: run sees other sequences than base from step 5",
        "the config of run is unknown",
        "different numbers of tokens seen: base 163,840, run 122,880; equal tokens means the smallest of these",
    ]


def test_losses_at_equal_tokens_and_at_equal_time(tmp_path: Path) -> None:
    """400 steps of 1 s against 200 steps of 4 s and twice the tokens: means over the last 5 % of either."""
    base = write_run(tmp_path, "base", steps=400, change=lambda step, _: {"loss": 400.0 - step, "step_seconds": 1.0})

    def twice_the_tokens(step: int, _: dict[str, Any]) -> dict[str, Any]:
        tokens = 2 * step * TOKENS_PER_STEP
        return {"loss": 1000.0 - step, "step_seconds": 4.0, "tokens": tokens, "applied": step != 200}

    wide = write_run(tmp_path, "wide", steps=200, change=twice_the_tokens)
    runs = read_runs([str(base.path), str(wide.path)])
    rows = {row.key: row for row in measures(runs, price=3.0)}
    assert rows["loss_at_equal_tokens"].values == pytest.approx((9.5, np.mean([1000 - s for s in range(190, 200)])))
    after_400_s = np.mean([1000 - step for step in range(91, 101)])  # ten steps, since 5 % of 400 s are only five
    assert rows["loss_at_equal_time"].values == pytest.approx((9.5, after_400_s))
    assert rows["loss_at_equal_tokens"].best == rows["skipped"].best == (0,)
    assert rows["validation_at_equal_tokens"].values == pytest.approx((3.25, 3.25))
    assert rows["cost"].values == pytest.approx((400 / 3600 * 2 * 3.0, 800 / 3600 * 2 * 3.0))
    assert rows["seconds_to_baseline"].values[0] == pytest.approx(400.0)
    mean, noise = loss_at(runs[0], 400.0, "seconds")
    assert (mean, noise) == pytest.approx((9.5, 2 * np.std(np.arange(20), ddof=1) / math.sqrt(20)))


def test_a_loss_that_was_not_finite_neither_reaches_the_baseline_nor_hides_that_it_was_reached(tmp_path: Path) -> None:
    """The means are over two of 40 steps: 100 - step reaches 60.5 at step 40, 100 - 2 step reaches 60 at 20 to 21."""
    base = write_run(tmp_path, "base", steps=40, change=lambda step, _: {"loss": 100.0 - step})
    broken = {5: math.inf, 8: math.nan}
    other = write_run(tmp_path, "other", steps=40, change=lambda n, _: {"loss": broken.get(n, 100.0 - 2 * n)})
    runs = read_runs([str(base.path), str(other.path)])
    goal = loss_at(runs[0], runs[0].columns.tokens[-1], "tokens")[0]
    first = next(n for n in range(9, 41) if 100 - 2 * n + 1 <= goal)
    rows = {row.key: row for row in measures(runs, price=None)}
    assert rows["seconds_to_baseline"].values[1] == pytest.approx(first * 0.5)


def test_a_winner_needs_more_than_noise(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    noisy = [{int(step): {"loss": 3.0 + rng.normal(0, 0.1)} for step in range(1, 201)} for _ in range(2)]
    folders = [
        write_run(tmp_path, f"r{index}", steps=200, change=lambda step, _, made=made: made[step])
        for index, made in enumerate(noisy)
    ]
    low = write_run(tmp_path, "low", steps=200, change=lambda step, _: {"loss": 2.0 + noisy[0][step]["loss"] / 100})
    lines = [line for line in _compared(*folders).verdicts if line.startswith("training loss at")]
    assert len(lines) == 1 and re.search(r": tie: r\d is lowest, within (noise|0\.05%) of r\d \(", lines[0])
    lines = [line for line in _compared(folders[0], low).verdicts if line.startswith("training loss at")]
    assert "low is best: 2.0" in lines[0]


def test_a_run_that_is_being_written_or_crashed_is_compared(tmp_path: Path) -> None:
    base, live = write_run(tmp_path, "base"), write_run(tmp_path, "live", steps=25)
    lines = live.events.read_bytes().splitlines(keepends=True)
    live.events.write_bytes(b"".join(lines[:-1]) + b'{"event":"step","st')
    comparison = _compared(base, live)
    verdict = comparison.runs[1].verdict
    assert verdict.word == "killed" and "no end was recorded" in verdict.cause
    assert comparison.as_dict()["runs"][1]["verdict"] == asdict(verdict)
    assert comparison.pairs[0].headline == "identical to step 25, the last that both have"


def test_a_run_that_died_before_its_first_step_is_no_trouble(tmp_path, capsys) -> None:
    base, writer = write_run(tmp_path, "base"), RunWriter(tmp_path, "dead")
    writer.start()
    dead = str(writer.run_dir.path)
    for order in ([str(base.path), dead], [dead, str(base.path)], [dead]):
        assert main([*order, "--html", str(tmp_path / "page.html"), "--price", "1"]) == 0
    assert "no step in common" in capsys.readouterr().out
    assert main([str(base.path), dead, "--tolerance", "1"]) == 3, "nothing was compared, so nothing agrees"


def test_labels_are_the_shortest_that_differ() -> None:
    assert labels(["runs/a", "runs/b"]) == ["a", "b"]
    assert labels(["/x/1/demo", "/x/2/demo", "/y/other"]) == ["1/demo", "2/demo", "other"]
    assert labels(["wandb:me/p/abc", "wandb:me/q/abc"]) == ["p/abc", "q/abc"]


def test_globs_and_files_name_runs_and_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("b", "a", "c"):
        write_run(tmp_path, name, steps=2)
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    assert [run.label for run in read_runs(["c/events.jsonl", "*"])] == ["c", "a", "b"]
    assert [run.label for run in read_runs([f"{tmp_path}/[ab]"])] == ["a", "b"]
    for arguments, text in (
        (["a", "empty"], "is this a run folder"),
        (["nothing*", "a"], "no folder with an events.jsonl matches"),
        (["a", "wandb:me/p"], "is not entity/project/run"),
    ):
        assert text in refused(read_runs, arguments)


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str], refusal: Any) -> None:
    base, same = str(write_run(tmp_path, "base").path), str(write_run(tmp_path, "same").path)
    other = str(write_run(tmp_path, "other", change=_from(20, loss=4.0), config={"hub_token": SECRET}).path)
    assert main([base, other]) == 0, "without --tolerance nothing is gated"
    text = capsys.readouterr().out
    assert (
        "identical to step 19, diverge at step 20" in text and "base  baseline, healthy" in text and SECRET not in text
    )
    assert main([base, same, "--tolerance", "0"]) == 0 and main([base, other, "--tolerance", "0.01"]) == 3
    assert main([base, other, "--tolerance", "0.01", "--absolute", "3"]) == 0
    with session(tmp_path / "crashed") as run:
        run.steps(3)
        run.end("crashed", 1)
    crashed = str(tmp_path / "crashed")
    gated = [main([*pair, "--tolerance", "9"]) for pair in ([base, crashed], [crashed, base])]
    assert gated == [3, 0], "few steps are alike, but it crashed"
    capsys.readouterr()
    assert main([base, other, "--json", "--price", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["partings"][0]["step"] == 20 and printed["apples_to_apples"] and SECRET not in json.dumps(printed)
    assert {row["key"] for row in printed["measures"]} >= {"loss_at_equal_tokens", "cost", "memory_bytes"}
    for wrong in ([base, str(tmp_path / "absent")], [base, base, "--tolerance", "0"], [base, "--html", "/dev/null/x"]):
        refusal(main, wrong)


def test_one_run_alone_is_shown_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(write_run(tmp_path, "alone").path)]) == 0
    text = capsys.readouterr().out
    assert "steps attempted" in text and "Where they diverge" not in text and "omparable" not in text


def test_a_dozen_runs_fit_on_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [
        str(write_run(tmp_path, f"run{n}", steps=12, config={"optimizer.learning_rate": n % 2}).path) for n in range(12)
    ]
    assert main(folders) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 120 and sum(line.startswith("run11") for line in lines) == 2
    assert any("0 (run0, run2, run4, run6, run8, run10); 1 (run1, run3" in line for line in lines)


def _noisy(root: Path, name: str, level: float, seed: int, config: dict[str, Any] | None = None) -> RunDir:
    """A run whose losses lie around `level`, with a spread of 0.01 nats from step to step."""
    noise = np.random.default_rng(crc32(name.encode()) + seed).normal(0, 0.01, 201)
    settings = {"run.seed": seed, **(config or {})}
    return write_run(root, name, steps=200, change=lambda n, _: {"loss": level + float(noise[n])}, config=settings)


def test_no_winner_is_named_under_a_caveat_that_voids_it(tmp_path: Path) -> None:
    base = _noisy(tmp_path, "base", 3.0, 0)
    other = _noisy(tmp_path, "other", 2.0, 0, {"data.tokenizer": "bytes"})
    comparison = _compared(base, other)
    losses = [line for line in comparison.verdicts if "loss" in line]
    assert losses and all(line.endswith(": no winner, different tokenizer") for line in losses)
    rows = {row.key: row for row in comparison.measures}
    assert rows["loss_at_equal_tokens"].best == () and rows["loss_at_equal_tokens"].withheld == "different tokenizer"
    assert not any("is best" in line for line in losses)


def test_repeats_of_one_run_have_no_winner(tmp_path: Path) -> None:
    """Seeds 1.2 % apart, and a control: its learning rate is nudged by 2^-8."""
    nudged = {"optimizer.learning_rate": 3e-4 * (1 + 2**-8)}
    runs = [_noisy(tmp_path, "seed-0", 3.0, 0), _noisy(tmp_path, "seed-1", 3.036, 1)]
    runs.append(_noisy(tmp_path, "control-1", 3.02, 0, nudged))
    comparison = _compared(*runs)
    assert [group.runs for group in comparison.groups] == [(0, 1, 2)]
    (line,) = [line for line in comparison.verdicts if line.startswith("training loss at")]
    assert re.search(r"no winner, the runs are repeats of one another and 1\.\d% apart$", line)
    assert all(not row.best for row in comparison.measures if row.kind in ("loss", "count"))
    assert not any("is best" in line for line in comparison.verdicts)


@pytest.mark.parametrize(("gap", "wins"), [(0.01, False), (0.5, True)])
def test_a_difference_has_to_exceed_that_of_seeds(tmp_path: Path, gap: float, wins: bool) -> None:
    """Two settings of three seeds each; 0.04 nats from seed to seed."""
    runs = [
        _noisy(tmp_path, f"{name}-seed{seed}", 3.0 - shift + 0.04 * (seed - 1), seed, {"optimizer.learning_rate": rate})
        for name, shift, rate in (("small", 0.0, 3e-4), ("large", gap, 6e-4))
        for seed in range(3)
    ]
    comparison = _compared(*runs)
    assert [(group.label, group.runs) for group in comparison.groups] == [("small", (0, 1, 2)), ("large", (3, 4, 5))]
    (line,) = [line for line in comparison.verdicts if line.startswith("training loss at")]
    assert ("large (mean of 3) is best: 2.4997 (-16.7%); the baseline 2.9997; repeats are 1." in line) == wins
    assert ("tie: large (mean of 3) is lowest, within noise of small (mean of 3) (" in line) != wins
    means, own = (
        next(row for row in rows if row.key == "loss_at_equal_tokens")
        for rows in (comparison.means, comparison.measures)
    )
    assert all(f"{value:.4f}" in line for value in means.values) and len(means.values) == 2
    assert own.best == () and means.best == ((1,) if wins else ()), "the best is that of the sentence"


def test_groups_whose_names_begin_alike_are_told_apart(tmp_path: Path) -> None:
    runs = [
        _noisy(tmp_path, f"lr{number}", 3.0, number % 2, {"optimizer.learning_rate": 1e-4 * (1 + number // 2)})
        for number in range(4)
    ]
    assert [group.label for group in _compared(*runs).groups] == ["lr0", "lr2"]


def test_a_sweep_of_the_learning_rate_is_no_set_of_repeats(tmp_path: Path) -> None:
    rates = (3e-4, 3.3e-4, 6e-4)
    runs = [_noisy(tmp_path, f"lr{rate}", 3.0 - rate, 0, {"optimizer.learning_rate": rate}) for rate in rates]
    assert [group.runs for group in _compared(*runs).groups] == [(0,), (1,), (2,)]


def test_a_run_that_ended_early_does_not_cut_the_others_short(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, name, config={"run.seed": seed}) for seed, name in enumerate(("base", "other"))]
    early = write_run(tmp_path, "early", steps=12)
    lines = early.events.read_bytes().splitlines(keepends=True)
    early.events.write_bytes(b"".join(lines[:-1]))  # killed
    rows = {row.key: row for row in _compared(*runs, early).measures}
    equal, own = rows["loss_at_equal_tokens"], rows["loss_where_ended_early"]
    assert f"at {40 * TOKENS_PER_STEP:,} tokens" in equal.title and math.isnan(equal.values[2])
    assert own.title == f"training loss at {12 * TOKENS_PER_STEP:,} tokens, where early ended"
    assert own.values[0] == own.values[1] == own.values[2]
    assert math.isnan(rows["validation_at_equal_tokens"].values[2])
    alone = {row.key: row for row in _compared(runs[0], early).measures}
    assert f"at {12 * TOKENS_PER_STEP:,} tokens" in alone["loss_at_equal_tokens"].title, "there is nobody to cut short"
    assert alone["skipped"].withheld == "different numbers of steps"


def test_each_run_that_came_less_far_is_compared_at_its_own_last_point(tmp_path: Path) -> None:
    """Runs of 40, 40, 20, 20 and 10 steps: the short ones finished theirs, the last is also the baseline."""
    lengths = {"ten": 10, "a": 40, "b": 40, "c": 20, "d": 20}
    runs = [write_run(tmp_path, name, steps=steps, config={"run.steps": steps}) for name, steps in lengths.items()]
    comparison = _compared(*runs)
    rows = {row.key: row for row in comparison.measures}
    known = {key: [not math.isnan(value) for value in row.values] for key, row in rows.items() if row.kind == "loss"}
    assert known["loss_at_equal_tokens"] == [False, True, True, False, False]
    assert known["loss_where_ended_c"] == known["validation_where_ended_c"] == [False, True, True, True, True]
    assert known["loss_where_ended_ten"] == [True] * 5 and "loss_where_ended_d" not in rows
    assert rows["loss_where_ended_c"].title == f"training loss at {20 * TOKENS_PER_STEP:,} tokens, where c and d ended"
    assert (
        sum(caveat.endswith("before the others: its losses are compared there") for caveat in comparison.caveats) == 3
    )
    assert any("where ten ended: tie: ten, a, b, c and d are equal" in line for line in comparison.verdicts)
    assert _compared(runs[1], runs[2]).caveats == []


def test_a_caveat_that_voids_losses_voids_them_where_a_run_ended_too(tmp_path: Path) -> None:
    runs = [write_run(tmp_path, name) for name in ("a", "b")]
    runs.append(write_run(tmp_path, "c", steps=12, config={"data.tokenizer": "bytes"}))
    lines = [line for line in _compared(*runs).verdicts if "where c ended" in line or "the last of c" in line]
    assert len(lines) == 2 and all("no winner, different tokenizer" in line for line in lines)


OTHER_RATES = {"optimizer.groups": [{"match": "*", "learning_rate": 1.0}], "optimizer.eps": 1.0}


@pytest.mark.parametrize(
    ("other", "caveat"),
    [
        ({"config": {"data.tokenizer": "bytes"}, "environment": {"data.vocab_size": 257}}, "different tokenizer"),
        ({"environment": {"data.fingerprint": "bb"}}, "different data"),
        ({"config": {"data.sequence_length": 1024}}, "different sequence length"),
        ({"config": {"task": "distill"}}, "different objective"),
        ({"config": {"preference.beta": 0.5}}, "different objective"),
        ({"config": {"batch.global_size": 16}}, "different batch"),
        ({"config": {"precision.compute": "fp32"}}, "different precision"),
        ({"config": {"run.steps": 80}}, "different schedule"),
        ({"environment": {"accelerator.device": "NVIDIA A100"}}, "different hardware"),
        ({"change": _from(9, lr=1e-5)}, "different learning rate: run differs from base from step 9"),
        ({"after": {9: [_incident("CUT_LR")]}}, "different learning rate: that of run was cut after step 9"),
        ({"config": {"schedule.final_ratio": 0.5}}, "different schedule: at equal tokens the learning rates differ"),
        ({"config": OTHER_RATES}, "different learning"),
        ({"change": lambda step, _: {"loss": 4.0 if step < 20 else 90.0}}, "run went wrong: diverged since step "),
    ],
)
def test_runs_that_are_not_comparable_get_a_caveat(tmp_path: Path, other: dict[str, Any], caveat: str) -> None:
    found = _compared(write_run(tmp_path, "base"), write_run(tmp_path, "run", **other)).caveats
    assert any(line.startswith(caveat) for line in found)
    assert len(found) == 1 or {"change", "after"} & other.keys() or other["config"] is OTHER_RATES, found


def test_losses_have_their_own_unit_and_no_winner_where_it_differs(tmp_path: Path) -> None:
    unit: dict[str, Any] = {"loss_unit": "mean squared error"}
    base, near = write_run(tmp_path, "base", **unit), write_run(tmp_path, "near", change=_only(40, loss=3.9), **unit)
    comparison = _compared(base, near, tolerance=Tolerance(absolute=0.5))
    sentence = r"within 1% or 0.5 mean squared error, .*gap [\d.]+ mean squared error "
    assert re.search(sentence, comparison.pairs[0].headline)
    assert any(re.search(r"; noise [\d.]+ mean squared error\)", line) for line in comparison.verdicts)
    rewarded = write_run(tmp_path, "rewarded", change=lambda *_: {"metrics": {"reward/mean": 1.0}}, **unit)
    for other in (write_run(tmp_path, "other", loss_unit="nats per row"), rewarded):
        comparison = _compared(base, other)
        assert comparison.caveats[0].startswith("different objective: a loss is of another quantity")
        losses = [row for row in comparison.measures if row.kind == "loss"]
        assert losses and all(row.withheld == "different objective" for row in losses)


def test_a_skip_shifts_the_schedule_and_is_no_other_learning_rate(tmp_path: Path) -> None:
    def late(step: int, _: dict[str, Any]) -> dict[str, Any]:
        return {"applied": step != 20, "lr": (step - (step > 20)) / 1e4}

    base = write_run(tmp_path, "base", change=lambda step, _: {"lr": step / 1e4})
    assert _compared(base, write_run(tmp_path, "run", change=late)).caveats == []


def test_one_number_stands_in_the_sentence_and_in_the_table(tmp_path: Path, capsys) -> None:
    base = write_run(tmp_path, "base", change=lambda step, _: {"loss": 3.0, "tokens_per_second": 1000.0})
    other = write_run(tmp_path, "other", change=lambda step, _: {"loss": 4.0, "tokens_per_second": 3000.0})
    first = ("base is best: 3.0000; other 4.0000 (+33.3%)", "other is best: 3.0k (+200%); the baseline 1.0k")
    second = ("base is best: 3.0000 (-25%); the baseline 4.0000", "other is best: 3.0k; base 1.0k (-66.7%)")
    for runs, words in (((base, other), first), ((other, base), second)):
        comparison = _compared(*runs)
        html = page(comparison)
        assert all(any(word in line for line in comparison.verdicts) for word in words)
        for value, change in re.findall(r"([\d.]+k?) \(([+-][\d.]+%)\)", " ".join(words)):
            assert re.search(rf">{re.escape(value)} <span class=\"(up|down)\">{re.escape(change)}</span>", html)


def test_a_measure_is_printed_against_a_setting(tmp_path: Path, capsys, refusal) -> None:
    rates = (1e-3, 5e-5, 3e-4)
    runs = [
        str(write_run(tmp_path, f"r{n}", change=_from(1, loss=3.0 + n), config={"optimizer.learning_rate": rate}).path)
        for n, rate in enumerate(rates)
    ]
    assert main([*runs, "--by", "learning_rate"]) == 0
    lines = capsys.readouterr().out.splitlines()[-4:]
    assert lines[0].split() == ["optimizer.learning_rate", "training", "loss", "at", "163,840", "tokens"] + [
        *("3.0000", "to", "5.0000", "run")
    ]
    assert [line.split()[0] for line in lines[1:]] == ["5e-5", "3e-4", "0.001"]
    dots = [line.split()[-2] for line in lines[1:]]
    assert [line.index("o") for line in dots] == [20, 39, 0] and {len(line) for line in dots} == {40}
    for wrong in (["--by", "nothing"], ["--by", "learning_rate", "--measure", "nothing"]):
        refusal(main, [*runs, *wrong], quiet=True)


def test_a_learning_rate_is_a_caveat_unless_it_is_what_is_compared(tmp_path: Path) -> None:
    base = write_run(tmp_path, "base")
    rate = write_run(tmp_path, "rate", config={"optimizer.learning_rate": 1e-3, "run.seed": 1})
    both = write_run(tmp_path, "both", config={"optimizer.learning_rate": 1e-3, "optimizer.weight_decay": 0.5})
    assert comparable(_compared(base, rate)).endswith(
        "the learning rate is what is compared: optimizer.learning_rate 3e-4 / 0.001"
    )
    assert not any("learning rate" in caveat for caveat in _compared(base, rate).caveats)
    assert any(caveat.startswith("different learning rate") for caveat in _compared(base, both).caveats)
