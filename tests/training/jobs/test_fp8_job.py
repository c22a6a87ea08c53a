"""A whole job in FP8: guarded, attributed, promoted step by step, resumed, replayed and exported."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.jobs.launches import command, events, finish, replay
from tools.export_hf.command import main as export
from training.checkpoint.partitions import open_saved_model

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


def test_the_export_has_the_masters(folder: Path, tmp_path: Path) -> None:
    checkpoint, out = folder / "runs/fp8/checkpoints/step-8", tmp_path / "out"
    assert export([str(checkpoint), str(out), "--dtype", "fp32"]) == 0
    masters = {
        name: tensor.read().clone() for name, tensor in open_saved_model(checkpoint / "deepspeed").tensors.items()
    }
    weights = dict(AutoModelForCausalLM.from_pretrained(out).named_parameters())
    assert all(torch.equal(weights[name], master) for name, master in masters.items() if name in weights)
    assert f"{LAYER}.weight" in weights
