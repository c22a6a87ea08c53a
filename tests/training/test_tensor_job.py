"""Whole jobs whose ranks share matrices: the record of one rank, exact and elastic resume, export, attribution."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.launches import command, events, finish
from tests.support.sharing_jobs import (
    BEGINNING,
    assert_close,
    assert_equal_checkpoints_of_no_update,
    assert_equal_exports,
    assert_equal_telemetry,
    assert_two_train_as_one,
    exported,
    numbers,
    run_one_and_two,
)

pytestmark = pytest.mark.slow

JOB = ("schedule.name=constant", "batch.micro_size=4", "telemetry.every_steps=2")
SHARED = "parallel.tensor=2"


def job(folder: Path, name: str, *overrides: str, ranks: int) -> str:
    return finish(command("python", folder, name, *JOB, *overrides), ranks=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run `one` of one rank, the run `two` of two ranks that share every matrix, and `first`, its beginning."""
    return run_one_and_two(tmp_path_factory.mktemp("jobs"), job, SHARED)


def test_two_ranks_with_half_of_each_matrix_train_as_one(folder: Path) -> None:
    assert_two_train_as_one(folder)
    saved = folder / "runs" / "two" / "checkpoints" / "step-6"
    assert (saved / "rng-rank-0.pt").read_bytes() == (saved / "rng-rank-1.pt").read_bytes(), "they drop out alike"
    assert_equal_telemetry(folder)
    for one, two in zip(events(folder, "one", "telemetry"), events(folder, "two", "telemetry"), strict=True):
        assert two["embedding_share"] == pytest.approx(one["embedding_share"], rel=1e-3)


def test_a_resumed_run_is_the_same_to_the_bit_and_another_layout_to_rounding(folder: Path) -> None:
    for name, overrides, ranks in (
        ("same", [SHARED], 2),
        ("alone", [], 1),
        ("data", ["batch.micro_size=2", "deepspeed.config=ds_configs/zero3_fp32.json"], 2),
        ("partitioned", [SHARED, "deepspeed.config=ds_configs/zero3_fp32.json"], 2),
    ):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
        output = job(folder, name, *overrides, ranks=ranks)
        assert ("parallel.tensor 2 -> 1" in output) == (SHARED not in overrides), output
        assert ("checksums agree" in output) == (name != "same"), output
    assert numbers(folder, "same") == numbers(folder, "two")
    for name in ("alone", "data", "partitioned"):
        assert_close(numbers(folder, name), numbers(folder, "one"))
    job(folder, "before", *BEGINNING, ranks=1)
    assert "parallel.tensor 1 -> 2" in job(folder, "before", SHARED, ranks=2)
    assert_close(numbers(folder, "before"), numbers(folder, "one"))


def test_the_checkpoint_of_no_update_is_that_of_one_rank(tmp_path: Path) -> None:
    assert_equal_checkpoints_of_no_update(tmp_path, job, SHARED)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_an_export_has_whole_tensors(folder: Path, tmp_path: Path, stage: int) -> None:
    given = [f"deepspeed.config=ds_configs/zero{stage}_fp32.json", "evaluate.every_steps=0"]
    found = []
    for name, overrides, ranks in ((f"one{stage}", [], 1), (f"two{stage}", [SHARED], 2)):
        job(folder, name, *given, *overrides, ranks=ranks)
        found.append(exported(folder, name, tmp_path / name))
    assert_equal_exports(*found)


def test_a_cause_names_the_slice(tmp_path: Path) -> None:
    fault = "faults=[{kind: nan_activation, step: 3, rank: 1, module: model.layers.1.mlp.up_proj}]"
    output = job(tmp_path, "bad", SHARED, fault, "run.steps=4", ranks=2)
    causes = events(tmp_path, "bad", "nonfinite")
    named = [(cause["rank"], cause["tensor_slice"], cause["tensor_slices"], cause["module"]) for cause in causes]
    assert named[:1] == [(1, 2, 2, "model.layers.1.mlp.up_proj")]
    assert "on rank 1 (slice 2 of 2 of its matrices)" in output


def test_a_manifest_is_kept_promoted_from_resumed_and_replayed(tmp_path: Path) -> None:
    """As of one rank: the same regions and incident, losses to rounding; resumed and replayed to the bit."""
    given = ["precision.path=manifest", f"precision.manifest={REPOSITORY}/config/manifests/llama_mixed.json"]
    given += ["precision.loss_scale.initial=1024", "guard.reactions=[promote]"]
    given += ["faults=[{kind: nan_activation, step: 3, module: model.layers.1.self_attn.q_proj}]"]
    for name, overrides, ranks in (("one", [], 1), ("two", [SHARED], 2)):
        job(tmp_path, name, *given, *overrides, ranks=ranks)
    job(tmp_path, "same", *given, SHARED, *BEGINNING, ranks=2)
    shutil.copytree(tmp_path / "runs" / "same", tmp_path / "runs" / "alone")
    job(tmp_path, "same", *given, SHARED, ranks=2)
    assert "parallel.tensor 2 -> 1" in job(tmp_path, "alone", *given, ranks=1)
    one, two = (events(tmp_path, name, "run_start")[0]["regions"] for name in ("one", "two"))
    assert two == one and {"fp16", "bf16", "fp32"} <= set(two.values())
    for name in ("one", "two"):
        [incident] = events(tmp_path, name, "incident")
        layer = "model.layers.1.self_attn"
        assert (incident["verdict"], incident["modules"]) == ("PROMOTE", [layer, f"{layer}.q_proj"])
        assert {event["module"] for event in events(tmp_path, name, "nonfinite")} == {f"{layer}.q_proj"}
        assert {"fp16", "bf16", "fp32"} == events(tmp_path, name, "precision")[0]["flop_share"].keys()
    assert numbers(tmp_path, "same") == numbers(tmp_path, "two")
    for name in ("two", "alone"):
        for found, expected in zip(numbers(tmp_path, name), numbers(tmp_path, "one"), strict=True):
            assert found == pytest.approx(expected, rel=2e-2, nan_ok=True)
    said = finish(["python", "-m", "tools.replay", str(tmp_path / "runs" / "two"), "--step", "6"], ranks=2)
    assert "as recorded" in said and "recorded:" not in said, said


def test_weights_of_a_folder_are_cut_and_their_masters_too(folder: Path, tmp_path: Path) -> None:
    """The vocabulary is odd, so that the head's slices differ."""
    checkpoint = folder / "runs" / "one" / "checkpoints" / "step-6"
    finish(["python", "-m", "tools.export_hf", str(checkpoint), str(tmp_path / "model"), "--dtype", "fp32"])
    given = [f"model={{name_or_path: {tmp_path}/model, architecture: null, config: {{}}}}", "precision.compute=bf16"]
    given += ["deepspeed.config=ds_configs/zero1_bf16.json", "evaluate.every_steps=0"]
    job(folder, "half", *given, ranks=1)
    job(folder, "halves", SHARED, *given, ranks=2)
    for one, two in zip(numbers(folder, "half")[:-1], numbers(folder, "halves")[:-1], strict=True):
        assert two == pytest.approx(one, rel=2e-2)
