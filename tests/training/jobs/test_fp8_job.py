"""A whole job in FP8: guarded, attributed, promoted step by step, resumed, replayed and exported."""

import json
from pathlib import Path

import pytest

from tests.support.jobs.launches import command, events, finish, replay

LAYER = "model.layers.1.mlp.up_proj"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of eight steps in two sessions, in which nan comes out of one FP8 layer at steps 3 and 5."""
    folder = tmp_path_factory.mktemp("fp8")
    rule = {"match": "*.layers.*_proj", "module_class": "Linear", "compute": "fp8", "reason": "a test"}
    (folder / "fp8.json").write_text(json.dumps({"default": "bf16", "rules": [rule]}))
    hits = ", ".join(f"{{kind: nan_activation, step: {step}, module: {LAYER}}}" for step in (3, 5))
    overrides = [f"precision.manifest={folder}/fp8.json", f"faults=[{hits}]", "guard.reactions=[promote]"]
    finish(command("python", folder, "fp8", *overrides, "checkpoint.every_steps=2"))
    finish(command("python", folder, "fp8", *overrides, "checkpoint.every_steps=2", "run.steps=8"))
    return folder


def test_a_layer_that_breaks_is_named_and_goes_to_bf16_and_then_to_fp32(folder: Path) -> None:
    incidents = events(folder, "fp8", "incident")
    assert [(event["step"], event["modules"], event["promoted_to"]) for event in incidents] == [
        (3, [LAYER], "bf16"),
        (5, [LAYER], "fp32"),
    ]
    assert {(event["module"], event["kind"]) for event in events(folder, "fp8", "nonfinite")} == {(LAYER, "nan")}
    first, resumed = events(folder, "fp8", "run_start")
    assert (first["regions"][LAYER], resumed["regions"][LAYER]) == ("fp8", "fp32")
    others = {name: compute for name, compute in resumed["regions"].items() if name != LAYER}
    assert others == {name: compute for name, compute in first["regions"].items() if name != LAYER}
    shares = [event["flop_share"] for event in events(folder, "fp8", "precision")]
    assert set(shares[0]) == {"fp8", "bf16"} and set(shares[-1]) == {"fp8", "bf16", "fp32"}
    assert shares[-1]["fp8"] < shares[0]["fp8"]


def test_a_step_after_the_promotion_is_replayed_as_recorded(folder: Path) -> None:
    output = replay(folder, "fp8", 7)
    assert output.count("as recorded") >= 1 and "recorded:" not in output
