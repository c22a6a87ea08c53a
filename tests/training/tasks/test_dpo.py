"""Preference optimisation equals plain torch on the same pairs, and starts from margins of exactly 0."""

import math
from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models import plain_steps
from tests.support.rows.chats import write_base, write_pairs
from tests.training.tasks import dpo_cases as cases
from tests.training.tasks.sft_cases import GIVEN, LORA, sets

STARTED = {"rewards/margin": 0.0, "rewards/chosen": 0.0, "rewards/rejected": 0.0, "rewards/accuracy": 0.5}


def require_equal(found: dict[str, Any], exact: dict[str, Any]) -> None:
    plain_steps.require_equal(found, exact)
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        estimates = {name: value for name, value in mine["metrics"].items() if name.startswith("kl_")}
        assert len(estimates) in (2, 4)
        # a log-probability of 8 is rounded by 5e-7
        assert estimates == pytest.approx({name: theirs[name] for name in estimates}, rel=2e-4, abs=5e-7)


def test_one_and_two_ranks_equal_plain_torch(pair: ProcessGroup, solo: ProcessGroup, folder: Path) -> None:
    exact: dict[str, Any] | None = None
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (2,))):
        for stage in stages:
            found, *_ = group.run(cases.steps, folder=folder, stage=stage)
            exact = exact or cases.oracle(folder, found)
            require_equal(found, exact)
            assert found["steps"][0]["metrics"] | STARTED == found["steps"][0]["metrics"]
            later = zip(found["steps"][1:], exact["steps"][1:], strict=True)
            assert [mine["metrics"]["rewards/accuracy"] == theirs["accuracy"] for mine, theirs in later] == [True, True]


CELLS = [
    (stage, compute) for compute in ("fp32", "bf16", "fp16") for stage in (0, 1, 2, 3) if stage or compute == "fp32"
]


@pytest.mark.one_in(14)
@pytest.mark.parametrize("kind", cases.KINDS)
@pytest.mark.parametrize(("stage", "compute"), CELLS)
def test_the_first_margins_are_exactly_0(pair: ProcessGroup, folder: Path, stage: int, compute: str, kind: str) -> None:
    """The reference is not rounded to the compute dtype, and is computed in the shapes of the step."""
    overrides = (*cases.KINDS[kind], "data.validation_fraction=0.2")
    found, other = pair.run(cases.first_step, folder=folder, stage=stage, compute=compute, overrides=overrides)
    assert found["metrics"] | STARTED == found["metrics"] == other["metrics"]
    assert {value for name, value in found["metrics"].items() if name.startswith("kl_")} == {0.0}
    assert found["loss"] == pytest.approx(math.log(2), abs=1e-7)
    assert found["trains"]
    held_out = found["validation"]
    assert held_out.metrics | STARTED == held_out.metrics
    assert held_out.loss == pytest.approx(math.log(2), abs=1e-7)
    assert held_out.perplexity is None


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stage", "compute"),
    [(2, "bf16"), (1, "bf16"), (1, "fp16"), (2, "fp16"), (2, "fp32"), (0, "fp32"), (1, "fp32"), (3, "fp32")],
)
def test_dora_starts_from_its_base_but_for_rounding(pair: ProcessGroup, folder: Path, stage: int, compute: str) -> None:
    dora = ("adapter={kind: dora, r: 4, alpha: 8}",)
    found, _ = pair.run(cases.first_step, folder=folder, stage=stage, compute=compute, overrides=dora)
    margin = found["metrics"]["rewards/margin"]
    if compute == "fp32":
        assert found["metrics"] | STARTED == found["metrics"]
    assert abs(margin) < {"fp32": 1e-9, "bf16": 2e-3, "fp16": 5e-4}[compute]
    assert found["loss"] == pytest.approx(math.log(2), abs=2e-3)


LOSSES: dict[str, dict[str, Any]] = {
    "smoothed": {"label_smoothing": 0.2, "beta": 0.3},
    "hinge": {"loss": "hinge", "beta": 0.5},
    "ipo": {"loss": "ipo", "beta": 0.2},
    "with an SFT term": {"sft_weight": 0.7},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", LOSSES)
def test_each_loss_equals_plain_torch(solo: ProcessGroup, folder: Path, name: str) -> None:
    given = [f"preference.{key}={value}" for key, value in LOSSES[name].items()]
    # with the SFT term many gradients are small, and at 1e-8 a step would be the sign of their roundings
    eps = 1e-6 if "sft_weight" in LOSSES[name] else 1e-8
    [found] = solo.run(cases.steps, folder=folder, overrides=(*given, f"optimizer.eps={eps}"))
    exact = cases.oracle(folder, found, preference=LOSSES[name], eps=eps)
    require_equal(found, exact)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_equals_plain_peft(pair: ProcessGroup, folder: Path, stage: int) -> None:
    found, _ = pair.run(cases.steps, folder=folder, stage=stage, overrides=(LORA,))
    require_equal(found, cases.oracle(folder, found, adapter=GIVEN))


def test_the_reference_is_kept_and_is_of_this_base(pair: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    kept = (f"data.cache_dir={tmp_path}/cache",)
    first, _ = pair.run(cases.first_step, folder=folder, compute="bf16", overrides=kept)
    again, _ = pair.run(cases.first_step, folder=folder, compute="bf16", overrides=kept)
    assert ["under the start weights took" in first["notes"][0], "computed earlier" in again["notes"][0]] == [
        True,
        True,
    ]
    assert first["metrics"] == again["metrics"]
    [said] = first["said"]
    assert said.startswith("reference: computing the log-probabilities of ") and said.endswith(", before step 1")
    assert not again["said"]
    [file] = tmp_path.glob("cache/*/references-*.safetensors")
    file.write_bytes(file.read_bytes()[:-4] + b"abcd")
    damaged, _ = pair.run(cases.first_step, folder=folder, compute="bf16", overrides=kept)
    assert "under the start weights took" in damaged["notes"][0]
    assert damaged["metrics"] == first["metrics"]
    write_base(folder / "other", seed=1)
    other, _ = pair.run(
        cases.first_step,
        folder=folder,
        compute="bf16",
        overrides=(*kept, f"model.name_or_path={folder}/other", f"data.tokenizer={folder}/base"),
    )
    assert "under the start weights took" in other["notes"][0]
    assert other["metrics"] | STARTED == other["metrics"]


def test_a_kill_while_the_reference_is_made_leaves_nothing_that_looks_finished(pair, folder, tmp_path) -> None:
    kept = (f"data.cache_dir={tmp_path}/cache",)
    with ProcessGroup(1) as doomed, pytest.raises(EOFError):
        doomed.run(cases.killed_while_writing, folder=folder, overrides=kept)
    assert not list(tmp_path.glob("cache/*/references-*"))
    found, _ = pair.run(cases.first_step, folder=folder, overrides=kept)
    assert "under the start weights took" in found["notes"][0]
    assert found["metrics"] | STARTED == found["metrics"]


def test_each_source_of_a_mixture_has_its_reference(pair: ProcessGroup, folder: Path) -> None:
    write_pairs(folder / "more.jsonl", 20, seed=1)
    sources = f"[{{path: {folder}/pairs.jsonl, name: a}}, {{path: {folder}/more.jsonl, name: b}}]"
    overrides = (f"data.sources={sources}", "data.path=null", "data.validation_fraction=0.2")
    found, _ = pair.run(sets, resolve=cases.resolve, folder=folder, compute="bf16", overrides=overrides)
    assert found["sets"].keys() == found["of source"].keys() == {"a", "b"}
    losses = [found["step"], *found["sets"].values(), *found["of source"].values()]
    assert losses == pytest.approx([math.log(2)] * 5, abs=1e-7)
