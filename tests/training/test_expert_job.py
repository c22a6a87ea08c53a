"""Whole jobs whose ranks share experts: the record of one rank, exact and elastic resume, export, attribution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.launches import command, events, finish, replay
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
from tests.support.small_run import gathered

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
    return run_one_and_two(tmp_path_factory.mktemp("jobs"), job, SHARED)


def test_two_ranks_with_half_of_the_experts_train_as_one(folder: Path) -> None:
    assert_two_train_as_one(folder)
    for one, two in zip(events(folder, "one", "step"), events(folder, "two", "step"), strict=True):
        routed = {key: value for key, value in one["metrics"].items() if key.startswith("router/")}
        assert len(routed) == 4
        assert {key: two["metrics"][key] for key in routed} == pytest.approx(routed, rel=1e-5)
    assert_equal_telemetry(folder)


def test_a_resumed_run_is_the_same_to_the_bit_and_another_layout_to_rounding(folder: Path) -> None:
    for name, overrides, ranks in (
        ("same", [SHARED], 2),
        ("alone", [], 1),
        ("four", ["parallel.expert=4"], 4),
        ("two_of_four", [SHARED, "deepspeed.config=ds_configs/zero1_fp32.json"], 4),
        ("partitioned", ["deepspeed.config=ds_configs/zero3_fp32.json"], 2),
        ("partitions_shared", [SHARED, "deepspeed.config=ds_configs/zero3_fp32.json"], 4),
    ):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
        output = job(folder, name, *overrides, ranks=ranks)
        assert ("parallel.expert 2 -> 1" in output) == (not overrides or name == "partitioned"), output
        assert ("checksums agree" in output) == (name != "same"), output
    assert numbers(folder, "same") == numbers(folder, "two")
    for name in ("alone", "four", "two_of_four", "partitioned", "partitions_shared"):
        assert_close(numbers(folder, name), numbers(folder, "one"))
    job(folder, "before", *BEGINNING, ranks=1)
    assert "parallel.expert 1 -> 2" in job(folder, "before", SHARED, ranks=2)
    assert_close(numbers(folder, "before"), numbers(folder, "one"))


@pytest.mark.parametrize("name", ["muon", "lamb"])
def test_an_optimizer_of_whole_parameters_resumes_on_another_layout_and_is_exported(tmp_path: Path, name: str) -> None:
    given = [f"optimizer.name={name}", "optimizer.learning_rate=0.005"]
    job(tmp_path, "one", *given, ranks=1)
    job(tmp_path, "two", *given, SHARED, ranks=2)
    job(tmp_path, "first", *given, SHARED, *BEGINNING, ranks=2)
    zero3 = "deepspeed.config=ds_configs/zero3_fp32.json"
    for again, overrides, ranks in (
        ("same", [SHARED], 2),
        ("alone", [], 1),
        ("partitions_shared", [SHARED, zero3], 4),
        ("partitioned", [zero3], 2),
    ):
        shutil.copytree(tmp_path / "runs" / "first", tmp_path / "runs" / again)
        output = job(tmp_path, again, *given, *overrides, ranks=ranks)
        assert ("checksums agree" in output) == (again != "same"), output
    assert numbers(tmp_path, "same") == numbers(tmp_path, "two")
    for again in ("two", "alone", "partitions_shared", "partitioned"):
        assert_close(numbers(tmp_path, again), numbers(tmp_path, "one"))
    assert_equal_exports(*(exported(tmp_path, run, tmp_path / run) for run in ("one", "two")))


def test_16_bit_weights_are_their_masters_after_a_resume(tmp_path: Path) -> None:
    """DeepSpeed's file of weights has the experts of rank 0 only."""
    for stage in (1, 2, 3):
        given = [SHARED, "precision.compute=bf16", f"deepspeed.config=ds_configs/zero{stage}_bf16.json"]
        job(tmp_path, f"whole{stage}", *given, ranks=2)
        job(tmp_path, f"half{stage}", *given, *BEGINNING, ranks=2)
        job(tmp_path, f"half{stage}", *given, ranks=2)
        assert numbers(tmp_path, f"half{stage}") == numbers(tmp_path, f"whole{stage}")


def test_the_checkpoint_of_no_update_is_that_of_one_rank(tmp_path: Path) -> None:
    assert_equal_checkpoints_of_no_update(tmp_path, job, SHARED)


def test_an_export_has_all_experts_and_starts_another_run(folder: Path, tmp_path: Path) -> None:
    assert_equal_exports(*(exported(folder, name, tmp_path / name) for name in ("one", "two")))
    given = [f"model={{name_or_path: {tmp_path}/two, architecture: null, config: {{}}}}", "precision.compute=bf16"]
    given += ["deepspeed.config=ds_configs/zero1_bf16.json", "evaluate.every_steps=0"]
    job(folder, "half", *given, ranks=1)
    job(folder, "halves", SHARED, *given, ranks=2)
    for single, shared in zip(numbers(folder, "half")[:-1], numbers(folder, "halves")[:-1], strict=True):
        assert shared == pytest.approx(single, rel=2e-2)


def test_partitioned_experts_are_resumed_resharded_and_exported(folder: Path, tmp_path: Path) -> None:
    partitioned = gathered(tmp_path, "fp32")
    job(folder, "apart", SHARED, partitioned, ranks=4)
    job(folder, "begun", SHARED, partitioned, *BEGINNING, ranks=4)
    for name, overrides, ranks in (
        ("again", [SHARED, partitioned], 4),
        ("by_four", ["parallel.expert=4", partitioned], 4),
        ("by_none", [partitioned], 2),
        ("by_one", [], 1),
        ("in_groups", [SHARED], 2),
    ):
        shutil.copytree(folder / "runs" / "begun", folder / "runs" / name)
        output = job(folder, name, *overrides, ranks=ranks)
        assert ("checksums agree" in output) == (name != "again"), output
        assert_close(numbers(folder, name), numbers(folder, "one"))
    assert numbers(folder, "again") == numbers(folder, "apart")
    assert_equal_exports(*(exported(folder, name, tmp_path / name) for name in ("one", "apart")))


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
