"""The defects: what each is, where it makes sense, and what a judge that finds it has to name.

Those marked (judge) are the ones that were first tried on the gate by somebody who had not written it; the others are
their neighbours. The nine of `lab.detection.gate` are planted from a step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.detection.plants import bits, forward, gradients, shared, state, updates
from lab.detection.plants.permanent import PLANTED, permanent
from lab.detection.plants.site import ATTENTION, EMBEDDING, HEAD, LAYER, LINEAR, MLP, NORM, ROTARY, Plant, on_engine
from lab.detection.plants.updates import Rule, rule
from precision.findings import LOSS

BF16, FP16, MANIFEST = PATHS = ("bf16", "fp16", "manifest")
HIGH_SCALE = ("precision.loss_scale.initial=262144",)
"""A loss scale from which a run first skips."""
WATCHED = ("guard.replica_checks=4", "guard.update_checks=65536", "guard.reexecute=every 4")
"""The checks for silent corruption; a slice as long as a rank's part, so that chance has no share in the table."""


@dataclass(frozen=True)
class Defect:
    """One of them."""

    name: str
    group: str
    plant: Plant | None
    modules: tuple[str, ...] = ()
    """One of these has to be named."""
    rank: bool = False
    """Whether `BAD_RANK` has to be named."""
    paths: tuple[str, ...] = PATHS
    variant: str = "plain"
    overrides: tuple[str, ...] = ()
    shared: bool = False
    """Whether the FP32 twin has it, too."""
    size: float = 0.0
    halving: bool = False
    """Whether `size` can be made smaller."""
    unit: str = ""
    of_judge: bool = False


def _forward(name: str, plant: Callable[[Any, float], None], *modules: str, **options: Any) -> Defect:
    return Defect(name, "forward pass", on_engine(plant), modules, **options)


def _update(name: str, make: Callable[[float], Rule], **options: Any) -> Defect:
    return Defect(name, "update", rule(make), **options)


def _bit(name: str, plant: Plant, **options: Any) -> Defect:
    given: dict[str, Any] = {"modules": (bits.HIT,), "rank": True, "size": 12.0, "halving": True, "unit": "bit"}
    each_step = (*WATCHED, "guard.replica_checks=1")
    return Defect(name, "flipped bit", plant, overrides=each_step, **given | options)


_JUDGE: dict[str, Any] = {"of_judge": True}
_SCALED: dict[str, Any] = {"size": 0.01, "halving": True, "unit": "factor 1 + x"}
TEAM = "the team's own"
"""The group of the nine."""
_NORMS = (NORM, f"{LAYER}.post_attention_layernorm", "model.norm", "model.layers.0.input_layernorm")
_TEAM = tuple(
    Defect(
        text.removeprefix("{kind: ").rstrip("}").partition(",")[0],
        TEAM,
        permanent(text),
        tuple(module for module in (NORM, LINEAR) if module in text),
    )
    for text in (template.format(norm=NORM, linear=LINEAR) for template, _ in PLANTED)
)
DEFECTS = (
    _forward("attention of one layer times 1.01", forward.scaled_attention, ATTENTION, **_SCALED, **_JUDGE),
    _forward("attention of all layers times 1.01", forward.scaled_attentions, ATTENTION, **_SCALED),
    _forward("scores of one attention times 1.01", forward.scaled_scores, ATTENTION, **_SCALED),
    _forward("softmax of one layer in BF16", forward.softmax_in_bf16, ATTENTION, **_JUDGE),
    _forward("softmax of all layers in BF16", forward.softmaxes_in_bf16, ATTENTION),
    _forward("causal mask of one layer lost", forward.lost_causal_mask, ATTENTION, **_JUDGE),
    _forward("shared keys repeated in another order", forward.repeated_key_order, ATTENTION),
    _forward("variance of one norm in BF16", forward.variance_in_bf16, NORM, **_JUDGE),
    _forward("variance of all norms in BF16", forward.variances_in_bf16, *_NORMS, **_JUDGE),
    _forward(
        "eps of one norm larger by 1e-3", forward.norm_eps, NORM, size=1e-3, halving=True, unit="added to a variance"
    ),
    _forward("one norm times 1.01", forward.scaled_norm, NORM, **_SCALED),
    _forward("one projection times 1.01", forward.scaled_linear, f"{MLP}.up_proj", **_SCALED),
    _forward("one MLP's product times 1.01", forward.scaled_mlp, MLP, **_SCALED),
    _forward("embedding times 1.01", forward.scaled_embedding, EMBEDDING, **_SCALED),
    _forward("logits times 1.01", forward.scaled_head, HEAD, **_SCALED),
    _forward("activation approximated", forward.approximate_activation, f"{MLP}.act_fn", MLP),
    _forward("one residual dropped", forward.dropped_residual, LAYER),
    _forward("rotary frequencies in BF16", forward.frequencies_in_bf16, ROTARY, **_JUDGE),
    _forward("rotary positions in BF16", forward.positions_in_bf16, ROTARY, **_JUDGE),
    _forward("rotary base 1% too large", forward.rotary_base, ROTARY, **_SCALED),
    _forward("head untied from its embedding", forward.stale_head, HEAD, variant="tied"),
    _forward("cross-entropy's sum in BF16", forward.loss_in_bf16, LOSS, **_JUDGE),
    _forward("labels smoothed by 1%", forward.smoothed_labels, size=0.01, halving=True, unit="share"),
    Defect("gradient of one matrix summed over ranks", "gradient", on_engine(gradients.summed), (LINEAR,), **_JUDGE),
    Defect(
        "gradient of one matrix dropped on one rank", "gradient", gradients.dropped_on_one_rank, (LINEAR,), **_JUDGE
    ),
    Defect(
        "gradient of one matrix times 1.5",
        "gradient",
        on_engine(gradients.scaled),
        (LINEAR,),
        size=0.5,
        halving=True,
        unit="factor 1 + x",
    ),
    Defect(
        "gradients rounded to BF16 before the reduction", "gradient", on_engine(gradients.rounded), paths=(MANIFEST,)
    ),
    Defect("gradients of micro-batches summed in BF16", "gradient", on_engine(gradients.summed_in_bf16), **_JUDGE),
    Defect("divided by the accumulation twice", "gradient", on_engine(gradients.divided_twice)),
    Defect("last micro-batch dropped", "gradient", on_engine(gradients.dropped_last_micro_batch)),
    Defect("mean of micro-batches' means", "gradient", on_engine(gradients.mean_of_means), variant="documents"),
    Defect(
        "reported loss 1% too low",
        "loss",
        on_engine(gradients.reported_lower),
        size=0.01,
        halving=True,
        unit="share",
        **_JUDGE,
    ),
    Defect("loss of micro-batches summed in FP16", "loss", on_engine(gradients.summed_in_fp16), **_JUDGE),
    _update("eps inside the root", lambda size: Rule(eps_inside=True), **_JUDGE),
    _update("eps times 100", lambda size: Rule(eps=1 + size), size=99.0, halving=True, unit="factor 1 + x"),
    _update("decay coupled to the gradient", lambda size: Rule(coupled=True), **_JUDGE),
    _update("decay without the learning rate", lambda size: Rule(decay_times_lr=False)),
    _update("no decay", lambda size: Rule(decay=lambda right: 0.0)),
    _update("decay on norms and embeddings", lambda size: Rule(decay=lambda right: 0.1), **_JUDGE),
    _update("bias correction a step ahead", lambda size: Rule(ahead=1), **_JUDGE),
    _update("no bias correction", lambda size: Rule(corrected=False)),
    _update("beta1 smaller by 0.05", lambda size: Rule(beta1=-size), size=0.05, halving=True, unit="subtracted"),
    _update("beta2 smaller by 0.01", lambda size: Rule(beta2=-size), size=0.01, halving=True, unit="subtracted"),
    _update("first moment rounded to BF16", lambda size: Rule(first=_dtype()), **_JUDGE),
    _update("second moment rounded to BF16", lambda size: Rule(second=_dtype()), **_JUDGE),
    _update("BF16 masters in one group", lambda size: Rule(masters=_dtype()), **_JUDGE),
    _update("one group ignores the learning rate", lambda size: Rule(deaf=2e-3), **_JUDGE),
    _update("learning rate times 1.05", lambda size: Rule(lr=1 + size), size=0.05, halving=True, unit="factor 1 + x"),
    _update("clipped by each rank's own norm", lambda size: Rule(gradient=updates.clipped_by_own_norm)),
    _update(
        "clipped before unscaling",
        lambda size: Rule(gradient=updates.clipped_before_unscaling),
        paths=(FP16,),
        **_JUDGE,
    ),
    _update(
        "unscaled wrongly on the step the scale grows",
        lambda size: Rule(gradient=updates.unscaled_by_the_next_scale),
        paths=(FP16,),
        **_JUDGE,
    ),
    Defect("loss scale never grows", "loss scale", state.never_grows, paths=(FP16,)),
    Defect(
        "overflow clamped, not skipped",
        "loss scale",
        on_engine(state.clamped_overflow),
        paths=(FP16,),
        overrides=HIGH_SCALE,
    ),
    Defect(
        "skipped step advances the schedule",
        "loss scale",
        state.skipped_step_moves_the_schedule,
        paths=(FP16,),
        overrides=HIGH_SCALE,
    ),
    Defect(
        "skipped step counts for Adam",
        "loss scale",
        on_engine(state.skipped_step_counts_for_adam),
        paths=(FP16,),
        overrides=HIGH_SCALE,
    ),
    Defect("16-bit copy stale on one rank", "state", state.stale_copy_on_one_rank, (LINEAR,), **_JUDGE),
    Defect("masters rounded at a load", "state", on_engine(state.masters_rounded_at_load)),
    Defect("moments lost at a load", "state", on_engine(state.moments_lost_at_load), **_JUDGE),
    Defect("Adam's count lost at a load", "state", on_engine(state.count_lost_at_load)),
    Defect("loss scale lost at a load", "state", on_engine(state.scale_lost_at_load), paths=(FP16,)),
    Defect("a batch used twice after a resume", "state", state.batch_used_twice, **_JUDGE),
    Defect(
        "random numbers not restored", "state", state.random_numbers_not_restored, variant="dropout", paths=(BF16, FP16)
    ),
    Defect(
        "same random numbers on all ranks",
        "state",
        state.same_random_numbers_on_all_ranks,
        variant="dropout",
        paths=(BF16, FP16),
    ),
    Defect("both: learning rate one step late", "shared", shared.late_rate, shared=True, **_JUDGE),
    Defect("both: schedule forgets its final rate", "shared", shared.forgotten_final_rate, shared=True),
    Defect(
        "both: mean of micro-batches' means",
        "shared",
        on_engine(gradients.mean_of_means),
        shared=True,
        variant="documents",
        **_JUDGE,
    ),
    Defect("both: mean of the ranks' means", "shared", gradients.mean_of_ranks, shared=True, variant="documents"),
    Defect("both: labels shifted twice", "shared", shared.shifted_labels, shared=True),
    Defect(
        "both: packed documents not kept apart",
        "shared",
        shared.documents_not_kept_apart,
        shared=True,
        variant="documents",
    ),
    Defect("both: every two batches swapped", "shared", shared.swapped_batches, shared=True),
    Defect("both: the same rows on all ranks", "shared", shared.same_rows_on_all_ranks, shared=True),
    Defect("both: decay on norms and embeddings", "shared", shared.decaying_norms, shared=True),
    _bit("bit of a weight flipped on one rank", bits.weight, **_JUDGE),
    _bit("bit of a master flipped", bits.master),
    _bit("bit of a first moment flipped", bits.first_moment),
    _bit("bit of a second moment flipped", bits.second_moment),
    _bit("bit of a gradient flipped before the reduction", bits.gradient),
    _bit("bit of a reduced gradient flipped", bits.reduced_gradient),
    _bit("bit of an activation flipped", bits.activation),
    *_TEAM,
)
"""Defects in the order of the page."""


def _dtype() -> Any:
    import torch

    return torch.bfloat16
