"""Single steps of ranks that share matrices against FP32 on whole ones: sound ones pass, planted defects are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.forked_launcher import forked_launcher
from tests.support.marks import slow
from tests.support.models.small_run import VOCABULARY
from tests.tools.parity import step_cases
from tests.tools.parity.test_gate import DEMO, SMALL
from tests.tools.parity.test_steps import CLIPPED, KINDS, LINEAR, NORM, PLANTS, failed, judged, module_of
from tests.training.engine.test_tensor_parallel import MANIFEST
from tools.parity import gate as parity

SCALE = ["precision.loss_scale.initial=1024", "precision.loss_scale.window=2"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        *((stage, compute, []) for stage, compute in ((2, "bf16"), (3, "fp16"), (1, "bf16"), (3, "bf16"))),
        (2, "bf16", ["model.activation_checkpointing=full"]),
        (2, "bf16", ["model.loss=chunked", "model.loss_chunk_tokens=8"]),
        (0, "fp32", []),
        (3, "fp32", []),
    ],
)
def test_every_module_is_measured_and_none_is_blamed(pair, stage, compute, overrides):
    given = {"stage": stage, "compute": compute, "steps": 3, "overrides": [CLIPPED, *SCALE, *overrides]}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        checks = judged(steps)
        assert not failed(checks), {name: checks[name] for name in failed(checks)}
        assert steps[0]["accumulation_error"]
        names = set(steps[0]["order"])
        assert {"model.embed_tokens", NORM, LINEAR, "model.layers.1.self_attn", "model.norm"} <= names
        assert {f"model.layers.0.self_attn.{one}_proj" for one in "qkvo"} <= names
        chunked = {"lm_head"} if any("chunked" in text for text in overrides) else set()  # as on one rank
        assert steps[0]["signature"]["not_measured"].keys() == chunked
        parts = {(row["module"], row["part"]) for row in steps[0]["signature"]["parts"]}
        assert {("model.layers.0.mlp.up_proj", "output"), (LINEAR, "gradient of its input")} <= parts


@pytest.mark.parametrize("stage", [2, slow(3), slow(0)])
def test_slices_of_the_head_may_differ_by_a_row(pair, stage):
    compute = "bf16" if stage else "fp32"
    given = {"stage": stage, "compute": compute, "steps": 2, "overrides": [CLIPPED], "vocabulary": VOCABULARY - 1}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        checks = judged(steps)
        assert not failed(checks), {name: checks[name] for name in failed(checks)}
        assert steps[0]["signature"]["not_measured"] == {} and "lm_head" in steps[0]["order"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox", "gemma3_text", "opt"])
def test_other_kinds_of_models_are_measured_as_well(pair, kind):
    """Norms of heads, fused queries, keys and values, biases."""
    given = {"stage": 2, "compute": "bf16", "steps": 2, "overrides": [CLIPPED], "kind": kind}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        checks = judged(steps)
        assert not failed(checks), {name: checks[name] for name in failed(checks)}


def under_a_manifest(folder: Path, stage: int, *overrides: str) -> dict[str, Any]:
    path = folder / "manifest.json"
    path.write_text(json.dumps(MANIFEST), encoding="utf-8")
    given = ["precision.path=manifest", f"precision.manifest={path}", "precision.compute=auto", *SCALE, *overrides]
    return {"stage": stage, "compute": "fp32", "steps": 3, "overrides": [CLIPPED, *given]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", [2, 1, 3])
def test_a_manifest_is_the_plan(pair, tmp_path, stage):
    for steps in pair.run(step_cases.of_shared_matrices, **under_a_manifest(tmp_path, stage)):
        checks = judged(steps)
        assert not failed(checks), {name: checks[name] for name in failed(checks)}
        assert steps[0]["signature"]["not_measured"] == {} and "model.layers.1.self_attn" in steps[0]["order"]


@pytest.mark.one_in(11)
@pytest.mark.parametrize(("stage", "compute"), [(2, "bf16"), (3, "fp16"), (2, "manifest")])
@pytest.mark.parametrize(("defect", "check"), PLANTS, ids=KINDS)
def test_a_planted_defect_is_found_and_named(pair, tmp_path, stage, compute, defect, check):
    given = {"stage": stage, "compute": compute, "steps": 3, "overrides": [CLIPPED, SCALE[0]]}
    given = under_a_manifest(tmp_path, stage) if compute == "manifest" else given
    for steps in pair.run(step_cases.of_shared_matrices, **given, defect=defect):
        found = judged(steps)[check]
        assert not found.passed
        assert found.modules == (module_of(defect),) if module_of(defect) else found.note.startswith("all ")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("module", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj"])
def test_one_ranks_slice_that_is_wrong_is_named(pair, module, forward):
    for check, _ in pair.run(step_cases.spoiled_slice, stage=2, module=module, forward=forward):
        assert not check.passed and check.modules == (module,)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "stage"), [("bf16", 2), ("fp16", 3), ("manifest", 2)])
def test_the_gate_says_of_two_ranks_what_it_says_of_one(tmp_path, compute, stage):
    """Twin and run share the matrices alike; both FP32 twins are the same training."""
    found = {}
    for ranks in (1, 2):
        given = [*SMALL, f"data.cache_dir={tmp_path}/cache", f"parallel.tensor={ranks}", "batch.micro_size=4"]
        if compute == "manifest":
            given += [f"deepspeed.stage={stage}", *under_a_manifest(tmp_path, stage)["overrides"]]
        else:
            given += [f"deepspeed.config=ds_configs/zero{stage}_{compute}.json", f"precision.compute={compute}"]
        with forked_launcher(ranks) as launcher:
            folder = tmp_path / str(ranks)
            chosen = parity.plan(DEMO, given, folder=folder, steps=12, processes=ranks, launcher=launcher)
            found[ranks] = parity.gate(chosen)
    assert found[2]["verdict"] == found[1]["verdict"] == "parity"
    one, two = ({check["name"]: check for check in found[ranks]["checks"]} for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert {name: check["passed"] for name, check in one.items()} == {
        name: check["passed"] for name, check in two.items()
    }
    twins = [found[ranks]["trajectories"]["fp32"][0]["losses"] for ranks in (1, 2)]
    assert twins[1] == pytest.approx(twins[0], rel=1e-5)
    assert two["module_error"]["measured"] == pytest.approx(one["module_error"]["measured"], rel=0.5)
    assert all(walk["recorded_loss"] == walk["steps"][0]["loss"] for walk in found[2]["walks"])
