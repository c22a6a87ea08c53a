"""Whole jobs whose ranks share sequences: the record of one rank, exact and elastic resume, attribution."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.launches import command, events, finish, replay
from tests.support.sharing_jobs import BEGINNING, assert_close, assert_two_train_as_one, numbers, run_one_and_two

pytestmark = pytest.mark.slow

LENGTH = 31
"""[tokens] Which two ranks do not divide."""
JOB = (f"data.sequence_length={LENGTH}", "data.document_masking=true", "schedule.name=constant", "batch.micro_size=4")
SHARED = "parallel.sequence=2"


def job(folder: Path, name: str, *overrides: str, ranks: int) -> str:
    return finish(command("python", folder, name, *JOB, *overrides), ranks=ranks)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the run `one` of one rank, `two` of two ranks that share every sequence, and `first`, its beginning."""
    return run_one_and_two(tmp_path_factory.mktemp("jobs"), job, SHARED)


def test_two_ranks_with_half_of_each_sequence_train_as_one(folder: Path) -> None:
    assert_two_train_as_one(folder)
    assert [event["tokens"] for event in events(folder, "two", "step")] == [8 * LENGTH * n for n in range(1, 7)]


def test_the_fp64_oracle_and_a_replay_agree_with_the_record(folder: Path) -> None:
    """The oracle runs every document alone in plain torch, and shares no code with the engine."""
    run = str(folder / "runs" / "two")
    said = finish(["python", "-m", "tools.parity", "--oracle", run])
    assert "as the oracle computed them" in said
    assert "reproduced" in replay(folder, "two", 4, ranks=2)


def test_a_resumed_run_is_the_same_to_the_bit_and_another_cut_to_rounding(folder: Path) -> None:
    for name, overrides, ranks in (("same", [SHARED], 2), ("alone", [], 1), ("apart", ["batch.micro_size=2"], 2)):
        shutil.copytree(folder / "runs" / "first", folder / "runs" / name)
        output = job(folder, name, *overrides, ranks=ranks)
        assert ("parallel.sequence 2 -> 1" in output) == (name != "same"), output
    assert numbers(folder, "same") == numbers(folder, "two")
    assert_close(numbers(folder, "alone"), numbers(folder, "one"))
    assert_close(numbers(folder, "apart"), numbers(folder, "one"))
    job(folder, "before", *BEGINNING, ranks=1)
    assert "parallel.sequence 1 -> 2" in job(folder, "before", SHARED, ranks=2)
    assert_close(numbers(folder, "before"), numbers(folder, "one"))


def test_a_cause_names_the_slice(tmp_path: Path) -> None:
    fault = "faults=[{kind: nan_activation, step: 3, rank: 1, module: model.layers.1.mlp}]"
    output = job(tmp_path, "bad", SHARED, fault, "run.steps=4", ranks=2)
    causes = events(tmp_path, "bad", "nonfinite")
    assert [(cause["rank"], cause["slice"], cause["slices"], cause["module"]) for cause in causes][:1] == [
        (1, 2, 2, "model.layers.1.mlp")
    ]
    assert "on rank 1 (slice 2 of 2 of its sequences)" in output


@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_answers_are_learned_as_by_one_rank(tmp_path: Path, packing: str) -> None:
    rows = [{"prompt": f"{n} plus {n} is", "completion": f" {2 * n}" + "." * (n % 9)} for n in range(120)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    given = ["data.source=jsonl", f"data.path={tmp_path}/rows.jsonl", "task=sft", f"data.packing={packing}"]
    given += ["data.document_masking=false", "checkpoint.every_steps=0", "generate.tokens=0"]
    job(tmp_path, "one", *given, ranks=1)
    job(tmp_path, "two", SHARED, *given, ranks=2)
    assert_close(numbers(tmp_path, "two"), numbers(tmp_path, "one"))
    assert numbers(tmp_path, "two", ("tokens",))[:-1] == numbers(tmp_path, "one", ("tokens",))[:-1]
