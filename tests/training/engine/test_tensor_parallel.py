"""Matrices that ranks share: the steps of one rank on whole matrices, at every ZeRO stage."""

import json
from typing import Any

import pytest

from modeling.tensor_parallel import MEASURED
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models import plain_steps
from tests.training.engine import tensor_cases

CLOSE = {"fp32": 1e-5, "bf16": 6.5e-2, "fp16": 7.8e-3}
CHUNKED = ["model.loss=chunked", "model.loss_chunk_tokens=5"]


@pytest.mark.parametrize(
    ("stage", "given"),
    [
        (1, {"compute": "bf16"}),
        slow(2, {"tied": True, "overrides": CHUNKED}),
        (3, {"overrides": ["model.activation_checkpointing=full", "optimizer.gradient_clipping=0.1"]}),
        (2, {"overrides": CHUNKED}),
        *(
            slow(stage, {"compute": compute, "overrides": CHUNKED})
            for stage, compute in ((3, "fp32"), (3, "bf16"), (1, "fp16"))
        ),
        *(slow(2, {"kind": kind, "overrides": CHUNKED}) for kind in ("phi", "gpt_neox")),
        *(slow(stage, {}) for stage in (0, 1, 2)),
        *(slow(stage, {"compute": "bf16"}) for stage in (2, 3)),
        slow(2, {"compute": "bf16", "overrides": ["precision.reduce=compute"]}),
        slow(2, {"compute": "fp16", "overrides": ["precision.loss_scale.policy=adaptive"]}),
        *(slow(stage, {"compute": "fp16"}) for stage in (1, 2, 3)),
        *(
            slow(2, {"overrides": [f"model.activation_checkpointing={kind}"]})
            for kind in ("selective", "attention", "ops")
        ),
        slow(1, {"overrides": ["model={activation_checkpointing: full, checkpointing_reentrant: true}"]}),
        *(slow(2, {"overrides": [f"optimizer.gradient_clipping={limit}"]}) for limit in (0, 0.1)),
    ],
)
def test_it_trains_as_one_rank_does(pair: ProcessGroup, stage: int, given: dict[str, Any]) -> None:
    for found in pair.run(tensor_cases.against_one_rank, stage=stage, **given):
        close = CLOSE[given.get("compute", "fp32")]
        assert found["start"] == 0, "the weights of one rank, cut"
        assert found["numbers"] < close
        assert found["masters"] < close
        assert found["norm"] > 0.2, "clipping would do nothing"


MANIFEST = {
    "default": "bf16",
    "rules": [
        {"match": "*.self_attn.[qk]_proj", "module_class": "Linear", "compute": "fp16", "reason": "a test"},
        {"match": "*.0.self_attn", "compute": "fp32", "reason": "a test"},
        {"match": "lm_head", "compute": "fp32", "reason": "a test"},
    ],
}


@pytest.mark.parametrize(
    ("stage", "default", "given"),
    [
        (2, "bf16", {}),
        *(
            slow(stage, default, given)
            for stage, default, given in (
                (1, "bf16", {}),
                (3, "bf16", {}),
                (1, "fp32", {}),
                (2, "fp32", {}),
                (3, "fp32", {}),
                (2, "bf16", {"kind": "qwen2"}),
                (2, "bf16", {"kind": "phi", "overrides": CHUNKED}),
                (3, "bf16", {"tied": True, "overrides": ["model.activation_checkpointing=full"]}),
            )
        ),
    ],
)
def test_a_manifest_names_the_same_regions_as_of_one_rank(pair, tmp_path, stage, default, given) -> None:
    rules = MANIFEST["rules"] if default == "bf16" else []
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"default": default, "rules": rules}), encoding="utf-8")
    for found in pair.run(tensor_cases.against_one_rank, stage=stage, manifest=str(path), **given):
        assert found["regions"] == found["regions of one rank"]
        assert found["regions"]["model.layers.1.self_attn"] == default
        assert found["start"] == 0
        assert max(found["numbers"], found["masters"]) < {"fp32": CLOSE["fp32"], "bf16": CLOSE["fp16"]}[default]


def test_an_fp8_manifest_is_refused_in_one_line(pair: ProcessGroup) -> None:
    manifest = "config/manifests/fp8.json"
    said = f"precision.manifest = {manifest}: FP8 is not verified with parallel.tensor = 2; remove one of them"
    assert pair.run(tensor_cases.refused, manifest=manifest) == [said, said]


@pytest.mark.parametrize(
    "overrides",
    [["optimizer={name: sgd, momentum: 0.9}"], slow(["optimizer.name=lion"]), slow(["data.document_masking=true"])],
)
def test_what_works_value_by_value_works_on_slices(pair: ProcessGroup, overrides: list[str]) -> None:
    for found in pair.run(tensor_cases.against_data_ranks, overrides=overrides):
        assert found["numbers"] < CLOSE["fp32"]
        assert found["masters"] < (1e-2 if "lion" in overrides[0] else CLOSE["fp32"]), "lion takes signs"


@pytest.mark.one_in(32)
@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("kind", sorted(tensor_cases.MEASURED))
def test_it_trains_every_kind_of_model_that_it_lets_share(pair: ProcessGroup, kind: str, stage: int) -> None:
    for found in pair.run(tensor_cases.against_one_rank, stage=stage, kind=kind):
        assert found["start"] == 0
        assert max(found["numbers"], found["masters"]) < CLOSE["fp32"]


def test_the_kinds_are_those_that_the_config_allows() -> None:
    assert tensor_cases.MEASURED.keys() == MEASURED


@pytest.mark.parametrize(
    ("stage", "compute"),
    [
        *((2, "fp32"), slow(2, "fp16")),
        *(slow(stage, "fp32") for stage in (0, 1, 3)),
        *(slow(stage, "bf16") for stage in (1, 2, 3)),
    ],
)
def test_four_ranks_share_by_two_and_have_two_halves_of_the_batch(four: ProcessGroup, stage: int, compute: str) -> None:
    for found in four.run(tensor_cases.against_one_rank, stage=stage, compute=compute):
        assert found["start"] == 0
        assert max(found["numbers"], found["masters"]) < CLOSE[compute]


def test_dropout_is_drawn_alike_and_a_step_finds_where_it_is_not(pair: ProcessGroup) -> None:
    one, two = pair.run(tensor_cases.with_dropout, stage=1, by_rank=False)
    assert one == two
    assert one["found"] == ""
    one, two = pair.run(tensor_cases.with_dropout, stage=1, by_rank=True)
    assert one["found"] == two["found"]
    assert "ranks that share matrices (parallel.tensor = 2) no longer compute the same" in one["found"]


@pytest.mark.parametrize("stage", [1, slow(3)])
def test_a_replica_that_parts_is_named_though_loss_and_norm_are_equal(pair: ProcessGroup, stage: int) -> None:
    for found in pair.run(tensor_cases.with_a_changed_replica, stage=stage):
        assert "model.embed_tokens.weight differs on rank 1" in found


@pytest.mark.parametrize(
    ("stage", "compute"), [(2, "fp32"), *(slow(*cell) for cell in ((0, "fp32"), (1, "bf16"), (3, "bf16")))]
)
def test_a_value_that_is_not_finite_is_blamed_on_the_rank_where_it_began(pair, stage, compute) -> None:
    for found in pair.run(tensor_cases.blamed, stage=stage, compute=compute):
        assert found == [[(rank, module or "loss")] for rank, _, module in plain_steps.SPOILED]
