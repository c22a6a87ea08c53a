"""Whole jobs whose ranks share experts: the record of one rank, exact and elastic resume, export, attribution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support.launches import command, events, finish, replay
from tests.training.test_sequence_job import assert_close, numbers
from training.checkpoint.manifest import read_state

pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
SHAPE |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
MODEL = f"model={{architecture: mixtral, balance_loss: 0.01, config: {json.dumps(SHAPE)}}}"
JOB = (MODEL, "schedule.name=constant", "telemetry.every_steps=2", "optimizer.eps=1e-4")
SHARED = "parallel.expert=2"


def job(folder: Path, name: str, *overrides: str, ranks: int, exit_code: int = 0) -> str:
    return finish(command("python", folder, name, *JOB, *overrides), ranks=ranks, exit_code=exit_code)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run `one` of one rank, the run `two` of two ranks that share experts, and `first`, its beginning."""
    folder = tmp_path_factory.mktemp("jobs")
    job(folder, "one", ranks=1)
    job(folder, "two", SHARED, ranks=2)
    job(folder, "first", SHARED, "run.steps=4", "evaluate.every_steps=0", ranks=2)
    return folder


def test_two_ranks_with_half_of_the_experts_train_as_one(folder: Path) -> None:
    assert_close(numbers(folder, "two"), numbers(folder, "one"))
    exact = ("tokens", "sample_ids_sha256", "position", "lr", "applied")
    assert numbers(folder, "two", exact)[:-1] == numbers(folder, "one", exact)[:-1]
    for one, two in zip(events(folder, "one", "step"), events(folder, "two", "step"), strict=True):
        routed = {key: value for key, value in one["metrics"].items() if key.startswith("router/")}
        assert len(routed) == 4
        assert {key: two["metrics"][key] for key in routed} == pytest.approx(routed, rel=1e-5)
    for one, two in zip(events(folder, "one", "telemetry"), events(folder, "two", "telemetry"), strict=True):
        assert two["gradients"].keys() == one["gradients"].keys()
        for module, figures in one["gradients"].items():
            for figure in ("norm", "rms", "maximum"):
                assert two["gradients"][module][figure] == pytest.approx(figures[figure], rel=1e-3), (module, figure)


def test_a_resumed_run_is_the_same_to_the_bit_and_another_layout_to_rounding(folder: Path) -> None:
    for name, overrides, ranks in (
        ("same", [SHARED], 2),
        ("alone", [], 1),
        ("four", ["parallel.expert=4"], 4),
        ("two_of_four", [SHARED, "deepspeed.config=ds_configs/zero1_fp32.json"], 4),
        ("partitioned", ["deepspeed.config=ds_configs/zero3_fp32.json"], 2),
    ):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
        output = job(folder, name, *overrides, ranks=ranks)
        assert ("parallel.expert 2 -> 1" in output) == (not overrides or name == "partitioned"), output
        assert ("checksums agree" in output) == (name != "same"), output
    assert numbers(folder, "same") == numbers(folder, "two")
    for name in ("alone", "four", "two_of_four", "partitioned"):
        assert_close(numbers(folder, name), numbers(folder, "one"))
    job(folder, "before", "run.steps=4", "evaluate.every_steps=0", ranks=1)
    assert "parallel.expert 1 -> 2" in job(folder, "before", SHARED, ranks=2)
    assert_close(numbers(folder, "before"), numbers(folder, "one"))


def test_16_bit_weights_are_their_masters_after_a_resume(tmp_path: Path) -> None:
    """DeepSpeed's file of weights has the experts of rank 0 only."""
    for stage in (1, 2):
        given = [SHARED, "precision.compute=bf16", f"deepspeed.config=ds_configs/zero{stage}_bf16.json"]
        job(tmp_path, f"whole{stage}", *given, ranks=2)
        job(tmp_path, f"half{stage}", *given, "run.steps=4", "evaluate.every_steps=0", ranks=2)
        job(tmp_path, f"half{stage}", *given, ranks=2)
        assert numbers(tmp_path, f"half{stage}") == numbers(tmp_path, f"whole{stage}")


def test_the_checkpoint_of_no_update_is_that_of_one_rank(tmp_path: Path) -> None:
    """Checksums do not depend on who holds what."""
    found = []
    for name, overrides, ranks in (("one", [], 1), ("two", [SHARED], 2)):
        given = ["run.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=0"]
        given += ["evaluate.every_steps=0", "checkpoint.every_steps=1"]
        job(tmp_path, name, *given, *overrides, ranks=ranks)
        state = read_state(tmp_path / "runs" / name / "checkpoints" / "step-1")
        found.append((state["parameters"], state["checksums"]["master"]))
    assert found[0] == found[1]


def test_an_export_has_all_experts_and_starts_another_run(folder: Path, tmp_path: Path) -> None:
    exported = []
    for name in ("one", "two"):
        out, checkpoint = tmp_path / name, folder / "runs" / name / "checkpoints" / "step-6"
        said = finish(["python", "-m", "training.export_hf", str(checkpoint), str(out), "--dtype", "fp32"])
        assert (out / "model.safetensors").is_file(), said
        exported.append(load_file(out / "model.safetensors"))
    one, two = exported
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert two[name].shape == values.shape
        assert float((two[name] - values).abs().max()) < 1e-5, name
    given = [f"model={{name_or_path: {tmp_path}/two, architecture: null, config: {{}}}}", "precision.compute=bf16"]
    given += ["deepspeed.config=ds_configs/zero1_bf16.json", "evaluate.every_steps=0"]
    job(folder, "half", *given, ranks=1)
    job(folder, "halves", SHARED, *given, ranks=2)
    for single, shared in zip(numbers(folder, "half")[:-1], numbers(folder, "halves")[:-1], strict=True):
        assert shared == pytest.approx(single, rel=2e-2)


def test_a_value_that_is_not_finite_is_blamed_on_the_rank_where_it_began(tmp_path: Path) -> None:
    fault = "faults=[{kind: nan_activation, step: 3, rank: 1, module: model.layers.0.mlp.experts}]"
    job(tmp_path, "bad", SHARED, fault, "run.steps=4", ranks=2)
    causes = events(tmp_path, "bad", "nonfinite")
    assert [(cause["rank"], cause["module"]) for cause in causes][:1] == [(1, "model.layers.0.mlp.experts")]


def test_a_replay_makes_the_steps_again_to_the_bit(folder: Path) -> None:
    said = replay(folder, "two", 4, ranks=2)
    assert said.count("as recorded") == 4 and said.rstrip().endswith("\nreproduced"), said
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "mixed")
    job(folder, "mixed", ranks=2)
    assert "with parallel.expert = 1; the step was made with 2" in replay(folder, "mixed", 2, exit_code=2, ranks=2)


def test_a_model_without_experts_is_refused_in_one_line(tmp_path: Path) -> None:
    output = finish(command("python", tmp_path, "dense", SHARED), ranks=2, exit_code=2)
    assert "parallel.expert = 2: cannot be had for model llama: it is verified for " in output
