"""The chunked loss on two real ranks, against the full one: training, manifests, who watches, and who is blamed."""

from functools import cache
from typing import Any

import pytest

from tests.modeling import chunked_loss_cases as cases
from tests.support.models.small_models import distance


@cache
def found(pair: Any, stage: int, compute: str, loss: str, *overrides: str, manifest: str = "") -> list[dict[str, Any]]:
    """Both ranks' results of two steps; the full loss in FP32 at stage 0 is asked for by every test."""
    options = {"stage": stage, "compute": compute, "loss": loss, "overrides": overrides, "manifest": manifest}
    return pair.run(cases.two_steps, **options)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("compute", "stage"),
    [("fp32", 0), *((compute, stage) for compute in ("fp32", "bf16") for stage in (1, 2, 3)), ("fp16", 3)],
)
def test_two_ranks_train_as_with_the_full_loss(pair, stage: int, compute: str) -> None:
    """FP32 agrees to rounding, masters included; 16 bits are no further from FP32's gradients than the full loss.

    Masters after a step of AdamW differ by the sign of the smallest gradients in 16 bits, so that they prove nothing.
    """
    exact = found(pair, 0, "fp32", "full")[0]
    full, chunked = (found(pair, stage, compute, loss) for loss in ("full", "chunked"))
    assert all(rank["chunked"] and rank["unchunked_reason"] is None for rank in chunked)
    assert not full[0]["chunked"]
    tolerance = {"fp32": 1e-6, "bf16": 1e-3, "fp16": 1e-4}[compute]
    for (loss, norm, applied), (loss_of_full, norm_of_full, _) in zip(chunked[0]["rows"], full[0]["rows"], strict=True):
        assert applied and loss == pytest.approx(loss_of_full, rel=tolerance)
        assert norm == pytest.approx(norm_of_full, rel=tolerance)
    assert chunked[0]["evaluated"] == pytest.approx(full[0]["evaluated"], rel=tolerance)
    if compute == "fp32":
        assert distance(chunked[0]["gradients"], exact["gradients"]) < 1e-6
        assert distance(chunked[0]["masters"], full[0]["masters"]) < 1e-5
    else:
        allowed = 1.1 * distance(full[0]["gradients"], exact["gradients"])
        assert distance(chunked[0]["gradients"], exact["gradients"]) < allowed, allowed


@pytest.mark.parametrize("stage", [1, 3])
def test_the_head_keeps_its_precision_region(pair, tmp_path, stage: int) -> None:
    """lm_head in FP16 among BF16 modules, and FP32 masters."""
    exact = found(pair, 0, "fp32", "full", "model.config.tie_word_embeddings=false")[0]
    untied = ("model.config.tie_word_embeddings=false",)
    ways = {loss: found(pair, stage, "fp32", loss, *untied, manifest=str(tmp_path))[0] for loss in ("full", "chunked")}
    assert ways["chunked"]["chunked"]
    for row, of_full in zip(ways["chunked"]["rows"], ways["full"]["rows"], strict=True):
        assert row == pytest.approx(of_full, rel=1e-3)
    for names in (set(exact["gradients"]), {"lm_head.weight"}):
        of = {name: exact["gradients"][name] for name in names}
        assert distance(ways["chunked"]["gradients"], of) < 1.1 * distance(ways["full"]["gradients"], of)


def test_an_observed_head_computes_what_it_computes_unobserved(pair, tmp_path) -> None:
    """A step stays chunked under hooks and modes; dtypes and FLOPs are those that are seen of the full loss."""
    full, chunked = (pair.run(cases.observed, loss=loss, folder=str(tmp_path))[0] for loss in ("full", "chunked"))
    assert chunked["step"] == chunked["unseen"] and full["step"] == full["unseen"]
    assert full["shapes"] == {(2, 16, 64)} and chunked["shapes"] == {(1, 1, 1)}
    assert chunked["computed"]["lm_head"] == {"fp16"}
    for what in ("computed", "flops", "inner"):
        assert chunked[what] == full[what] != {}


@pytest.mark.parametrize(
    ("module", "kind"),
    [("lm_head", "nan_activation"), ("model.layers.1.mlp.down_proj", "nan_activation"), ("lm_head", "inf_gradient")],
)
def test_a_spoiled_step_names_the_same_module_without_making_logits(pair, module: str, kind: str) -> None:
    full, chunked = (pair.run(cases.spoiled, loss=loss, module=module, kind=kind)[0] for loss in ("full", "chunked"))
    assert not chunked["finite"] and chunked["blamed"] == full["blamed"] != []
    assert full["shapes"] == {(2, 16, 64)} and chunked["shapes"] <= {(1, 1, 1)} | full["shapes"]


def test_what_cannot_be_chunked_is_refused_or_stays_full(pair) -> None:
    """RecurrentGemma caps its logits under a name of its own."""
    for rank in pair.run(cases.cannot):
        assert rank["refused"].startswith("model.loss = chunked: not supported for model recurrent_gemma: it changes")
        assert rank["refused"].endswith("set model.loss=auto or full")
        assert not rank["chunked"] and "unknown way" in rank["unchunked_reason"]
        assert rank["loss"] == rank["loss_of_full"]


def test_a_micro_batch_that_counts_for_nothing_has_gradients_of_numbers(pair) -> None:
    assert all(gradient.isfinite().all() for gradient in pair.run(cases.unwanted)[0].values())
