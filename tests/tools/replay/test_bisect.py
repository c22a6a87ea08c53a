"""The step at which a run departs from its FP32 twin, and the module; and a recorded step that is made again."""

import math
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from config.schema import ParitySection
from tests.support.jobs.launches import command, events, finish, with_defect
from tests.support.marks import slow
from tests.tools.parity.test_judge_steps import step as measured_step
from tests.tools.replay import bisect_cases
from tools.parity.steps import verdict
from tools.replay import repeat
from tools.replay.bisect import leaving, search

BOUNDS = ParitySection()
MODULE = "model.layers.1.mlp.down_proj"
BF16 = ["precision.compute=bf16", "deepspeed.config=ds_configs/zero2_bf16.json", "evaluate.every_steps=0"]
RUN = [*BF16, "generate.tokens=0", "telemetry.every_steps=0", "run.steps=9", "checkpoint.keep=9"]


def bisected(folder, name, *overrides, defect="", exit_code=3, ranks=1):
    """A run's lines under --bisect."""
    finish(with_defect(defect, command("python", folder, name, *RUN, *overrides)), ranks=ranks)
    job = ["python", "-m", "tools.replay", str(folder / "runs" / name), "--bisect"]
    return finish(with_defect(defect, job), exit_code=exit_code, ranks=ranks).splitlines()


def test_a_defect_that_begins_at_a_step_is_found_there_and_in_its_module(tmp_path):
    defect = f"{{kind: coarse_output, module: {MODULE}, from_step: 6}}"
    lines = bisected(tmp_path, "coarse", defect=defect)
    assert lines[-1].startswith(f"the run departs from its FP32 twin at step 6, in {MODULE}: module_error 0.0")
    probed = [int(text.split()[-1][:-1]) for text in lines if text.startswith("checkpoint of step")]
    assert probed == [4, 2] or probed == [4, 6] or probed == [4]
    assert not any(": not reproduced" in text for text in lines)
    walked = lines[lines.index("every step from the checkpoint of step 2 on, to step 6:") + 1 : -1]
    assert [text.split(":")[0] for text in walked] == ["step 3", "step 4", "step 5", "step 6"]


GPT2 = (
    "model.architecture=gpt2",
    "model.config={n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.1, attn_pdrop: 0.1, embd_pdrop: 0.1}",
)


def test_a_run_with_dropout_is_made_again_with_the_values_it_dropped(tmp_path):
    """Starts from the seed and from a checkpoint; what is compared with FP32 drops none."""
    module = "transformer.h.1.mlp.c_proj"
    defect = f"{{kind: coarse_output, module: {module}, from_step: 6}}"
    lines = bisected(tmp_path, "drops", *GPT2, "checkpoint.every_steps=4", "run.steps=6", defect=defect)
    assert lines[-1].startswith(f"the run departs from its FP32 twin at step 6, in {module}: module_error 0.0")
    made = [text for text in lines if text.startswith("step ")]
    assert [text.split(":")[0] for text in made] == [f"step {number}" for number in (5, 6, 1, 2, 3, 4, 5, 6)]
    assert all(", with dropout " in text and ": not reproduced" not in text for text in made)


@pytest.mark.parametrize(("stage", "compute"), [(2, "fp16"), slow(3, "bf16")])
def test_a_step_with_dropout_is_the_runs_though_it_is_measured(pair, stage, compute):
    """To the bit, whatever the passes without dropout draw; where only they overflow, no gradient is judged."""
    of_case = {"stage": stage, "compute": compute, "overrides": [*GPT2, "precision.loss_scale.initial=1024"]}
    ran, measured = (pair.run(bisect_cases.step_with_dropout, measured=each, **of_case) for each in (False, True))
    for run, found in zip(ran, measured, strict=True):
        row = found["row"]
        assert found["state"] == run["state"]
        assert {key: row[key] for key in run["row"]} == run["row"]
        assert row["loss"] != row["loss_with_dropout"] and row["applied"] and row["update_error"]
        assert bool(row["parameters"]) == (compute != "fp16")
        assert leaving({"step": 1, **row}, BOUNDS) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "at", "ranks"),
    [
        (f"{{kind: flushed_gradient, module: {MODULE}, from_step: 3}}", f"step 3, in {MODULE}: ", 2),
        (f"{{kind: lost_reduction, module: {MODULE}, from_step: 9}}", f"step 9, in {MODULE}: gradient_error", 2),
        ("{kind: wrong_unscaling, from_step: 2}", "step 2, in the whole step: gradient_error", 1),
        ("{kind: silent_skip, from_step: 7}", "step 8, in the whole step: update_error", 1),
        ("{kind: unclipped_update, from_step: 1}", "step 1, in model.", 1),
        (f"{{kind: stale_weight, module: {MODULE}, from_step: 5}}", f"step 6, in {MODULE}: weight_drift", 1),
        ("", "", 2),
    ],
)
def test_every_kind_is_found_at_its_step(tmp_path, defect, at, ranks):
    given = {"defect": defect, "exit_code": 3 if defect else 0, "ranks": ranks}
    lines = bisected(tmp_path, "it", "optimizer.gradient_clipping=0.5", **given)
    assert lines[-1].startswith(
        f"the run departs from its FP32 twin at {at}" if defect else "the run matches its FP32 twin"
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "before"), [("silent_skip", 1), ("unclipped_update", 0)])
def test_updates_of_a_run_with_dropout_are_judged_through_its_overflows(tmp_path, kind, before):
    """A run in FP16, whose scale is the run's at every step, though the passes without dropout may overflow, too.

    before: steps from the defect's begin to its first effect. Which steps overflow a sound run tells.
    """
    scale = ["precision.loss_scale.initial=1048576", "precision.loss_scale.window=2", "precision.compute=fp16"]
    fp16 = [*GPT2, *scale, "deepspeed.config=ds_configs/zero2_fp16.json", "optimizer.gradient_clipping=0.5"]
    lines = bisected(tmp_path, "sound", *fp16, exit_code=0, ranks=2)
    assert lines[-1].startswith("the run matches its FP32 twin")
    steps = events(tmp_path, "sound", "step")
    assert sum(not event["applied"] for event in steps) > 1
    at = max(event["step"] for event in steps if event["applied"] and event["grad_norm"] > 0.5)
    lines = bisected(tmp_path, "it", *fp16, defect=f"{{kind: {kind}, from_step: {at - before}}}", ranks=2)
    assert lines[-1].startswith(f"the run departs from its FP32 twin at step {at}, in the whole step: update_error")
    assert not any(": not reproduced" in text for text in lines)


def test_checkpoints_are_searched_by_halves():
    for count in range(9):
        points = [10 * index for index in range(1, count + 1)]
        for first in range(1, 101):
            asked = []

            def leaves(point, first=first, asked=asked):
                asked.append(point)
                return max(first, point + 1) if first <= point + 2 else None

            start, at = search(points, leaves)
            assert start < first <= (at or 100)
            assert start == max([0, *(point for point in points if first > point + 2)])
            assert len(asked) <= math.ceil(math.log2(count + 1))


step = partial(measured_step, 7, "abc")
"""A measured step of three modules that is within the bounds, but for what is given."""


def test_the_first_in_the_order_of_a_step_is_named_and_not_the_worst():
    far = {"relative_error": 0.9, "cosine": 1.0, "sign_agreement": 1.0}
    farther = far | {"relative_error": 5.0}
    near = step()["parameters"]["a.weight"]
    gradients = {"a.weight": farther, "b.weight": far, "c.weight": near}
    assert leaving(step(), BOUNDS) is None
    found = leaving(step(own_error={"a": 0.001, "b": 0.05, "c": math.inf}, parameters=gradients), BOUNDS)
    assert found is not None and (found.step, found.check) == (7, "module_error")
    assert (found.module, found.measured) == ("b", 0.05)
    found = leaving(step(parameters=gradients, update_error={"a.weight": 1.0}), BOUNDS)
    assert found is not None and (found.check, found.module, found.measured) == ("gradient_error", "b", 0.9)
    found = leaving(step(grad_norm=2.0), BOUNDS)
    assert found is not None and (found.check, found.module) == ("grad_norm_error", "(gradient norm)")
    found = leaving(step(update_error={"a.weight": 1.0, "b.weight": 1.0, "c.weight": 1.0}), BOUNDS)
    assert found is not None and found.text().startswith("the run departs from its FP32 twin at step 7, in the whole")


def test_the_verdict_on_a_checkpoint_blames_what_is_wrong_first():
    gradients = step()["parameters"] | {"a.weight": {"relative_error": 5.0, "cosine": 0.0, "sign_agreement": 0.5}}
    whole = {"update_error": dict.fromkeys(gradients, 1.0), "grad_norm": 2.0}
    for values, modules in (
        ({}, []),
        ({"own_error": {"a": 0.001, "b": 0.05, "c": 0.9}, "parameters": gradients}, ["c", "b"]),
        ({"parameters": gradients, **whole}, ["a"]),
        (whole, []),
    ):
        found = verdict([{"point": 6, "restored": True, "steps": [step(**values)]}], BOUNDS)
        assert found["modules"] == modules and bool(found["failed"]) == bool(values)
    gone = verdict([{"point": 6, "restored": False, "why": "damaged", "steps": []}], BOUNDS)
    assert "restored_share" in gone["failed"] and gone["modules"] == []


STEP: dict[str, Any] = {
    "step": 3,
    "loss": 2.5,
    "grad_norm": 1.25,
    "loss_scale": 1.0,
    "lr": 0.001,
    "applied": True,
    "sample_ids_sha256": "ab",
}


@pytest.mark.parametrize(
    ("changed", "allowed", "same"),
    [
        ({}, 0.0, True),
        ({"loss": 2.5000001}, 0.0, False),
        ({"loss": 2.5000001, "grad_norm": 1.26}, 0.01, True),
        ({"grad_norm": 1.3}, 0.01, False),
        ({"loss": float("nan")}, 0.01, False),
        ({"sample_ids_sha256": "cd"}, 0.01, False),
        ({"lr": 0.0010001}, 0.01, False),
    ],
)
def test_sums_alone_may_differ_where_they_have_no_order(changed: dict[str, Any], allowed: float, same: bool) -> None:
    said: list[str] = []
    bounds = dict.fromkeys(("loss", "grad_norm"), allowed) if allowed else {}
    assert repeat._compare(STEP | changed, STEP, said.append, allowed=bounds) is same
    assert ("two repeats" in said[0]) is (same and bool(changed))
    assert ("to the bit as recorded" in said[0]) is not bool(changed)


def test_a_replay_whose_sums_have_no_fixed_order_is_held_to_what_repeats_differ_by(finished, tmp_path) -> None:
    """Rounded otherwise in each run, a step is nearly the recorded one, and a loss that is a tenth larger is not."""

    def noisy(run: Path, exit_code: int) -> str:
        job = ["python", "-m", "tests.support.jobs.noisy_replay", str(run), "--step", "6"]
        return finish(job, ranks=2, exit_code=exit_code)

    said = noisy(finished / "runs/it", 0)
    assert 1 <= said.count("once more, to see how far two repeats differ") <= 3
    assert said.count("10 times what two repeats differ by") == 2 and said.rstrip().endswith("\nreproduced"), said
    shutil.copytree(finished / "runs/it", tmp_path / "it")
    text = (tmp_path / "it/events.jsonl").read_text()
    [line] = [line for line in text.splitlines() if '"event":"step"' in line and '"step":5,' in line]
    loss = float(line.partition('"loss":')[2].partition(",")[0])
    other = line.replace(f'"loss":{loss!r}', f'"loss":{1.1 * loss!r}')
    (tmp_path / "it/events.jsonl").write_text(text.replace(line, other))
    said = noisy(tmp_path / "it", 3)
    assert said.count("once more") == 3
    assert f"recorded: loss {1.1 * loss!r}" in said and said.count("; recorded: ") == 1, said
    assert said.rstrip().endswith("not reproduced: see the steps marked above")
