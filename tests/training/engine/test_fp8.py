"""FP8 on the engine: a step that does not depend on stage, ranks and micro-batches, observed, promoted and resumed."""

import json
from pathlib import Path

import pytest

from tests.support.models import small_run
from tests.support.models.small_run import manifest_of
from tests.training import reaction_cases
from tests.training.engine import engine_cases
from tests.training.engine.test_engine import difference, require_step

RULES = [{"match": "*.layers.*", "module_class": "Linear", "compute": "fp8", "reason": "test"}]


@pytest.fixture(scope="module")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 in FP32 surroundings: no other rounding hides a difference."""
    path = tmp_path_factory.mktemp("fp8") / "fp8.json"
    path.write_text(json.dumps({"default": "fp32", "rules": RULES}))
    return path


@pytest.fixture(scope="module")
def expected(solo, manifest):
    """The step of plain torch, in one process, on the whole batch; and that without FP8."""
    steps = {
        path: solo.run(engine_cases.reference_step, mask="uneven", manifest=path)[0] for path in (str(manifest), None)
    }
    assert difference(steps[str(manifest)]["after"], steps[None]["after"]) > 1e-3
    return steps[str(manifest)]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_step_does_not_depend_on_the_layout(pair, solo, four, manifest, expected, stage):
    """FP8 or not, masters are the same at every stage, for one, two and four ranks, however micro-batches are cut."""
    for group, micro in ((solo, 2), (pair, 4), (pair, 1), *([(four, 1)] if stage == 3 else [])):
        require_the_step(group, manifest, expected, stage=stage, micro=micro)


def require_the_step(group, manifest, expected, *, stage, micro, variant="", overrides=()):
    """Assert that every rank of the group makes the `expected` step."""
    given = ["precision.path=manifest", f"precision.manifest={manifest}", *overrides]
    options = {"compute": "fp32", "micro": micro, "mask": "uneven", "variant": variant, "overrides": given}
    require_step(group.run(engine_cases.one_step, stage=stage, **options), expected)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "variant", "overrides"),
    [
        (2, "_offload", ()),
        (3, "_offload", ()),
        (1, "", ("model.activation_checkpointing=full",)),
        (3, "", ("model.activation_checkpointing=full", "model.checkpointing_reentrant=true")),
        (0, "", ("model.activation_checkpointing=selective",)),
        (2, "", ("precision.fp8.kernel=scaled_mm",)),
    ],
)
def test_a_step_does_not_depend_on_offload_recomputation_and_kernel(
    pair, manifest, expected, stage, variant, overrides
):
    require_the_step(pair, manifest, expected, stage=stage, micro=2, variant=variant, overrides=overrides)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_computes_in_it_is_observed_and_can_change(pair, tmp_path, stage):
    manifest = {"default": "bf16", "rules": RULES}
    found = pair.run(reaction_cases.manifest_steps, stage=stage, folder=str(tmp_path), manifest=manifest, overrides=[])
    for result in found:
        assert all(applied for *_, applied in result["rows"])
        assert result["share"]["fp8"] > 0.3
        assert result["computed"] == ({"fp8"}, {"fp32"})
        assert result["masters"] == {"torch.float32"}


@pytest.mark.parametrize("default", ["fp16", "bf16"])
def test_it_is_refused_beside_fp16(solo, tmp_path, default):
    """As the ambient dtype, or in other regions."""
    other = {"match": "*.mlp.*_proj", "compute": "fp16", "reason": "test"}
    rules = RULES if default == "fp16" else [{**RULES[0], "match": "*.self_attn.*_proj"}, other]
    given = manifest_of(tmp_path, {"default": default, "rules": rules})
    (said,) = solo.run(small_run.refused, stage=2, compute="fp32", overrides=given)
    where = given[1].replace("=", " = ")
    assert said == f"{where}: FP8 is not verified beside FP16; use bf16 instead of fp16 in it, or remove fp8"


def test_a_kernel_is_tried_before_it_is_used(pair, tmp_path):
    """A fault on one rank is an error of all where the kernel was requested, and emulated with `auto`."""
    results = pair.run(engine_cases.chosen_kernels, folder=str(tmp_path), manifest={"default": "bf16", "rules": RULES})
    assert results[0] == results[1]
    found = results[0]
    if "it fails" in found["asked"]:
        pytest.skip(f"torch has no such kernel for this CPU: {found['asked']}")
    assert found["asked"].startswith("precision.fp8.kernel: torch._scaled_mm; it matches FP8's definition on 3")
    refused, layer = (
        "precision.fp8.kernel = scaled_mm: rank {}: torch._scaled_mm for ",
        "model.layers.0.self_attn.q_proj",
    )
    assert found["by block"].startswith(refused.format(0) + layer) and "no scales by block" in found["by block"]
    assert found["asked, wrong"].startswith(refused.format(1) + layer)
    assert "times as far from FP8's definition as rounding explains" in found["asked, wrong"]
    assert found["auto, wrong"].startswith("precision.fp8.kernel = auto: emulated on every rank, because of rank 1")
    assert found["then"] == "emulate"
