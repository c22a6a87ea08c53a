"""The defects: what each is, where it makes sense, and what a judge that finds it has to name.

Those marked (judge) are the ones that were first tried on the gate by somebody who had not written it; the others are
their neighbours. The nine of `lab.detection.gate` are planted from a step on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lab.detection.plants import bits, forward, gradients, shared, state, updates
from lab.detection.plants.permanent import PLANTED, permanent
from lab.detection.plants.site import (
    ATTENTION,
    EMBEDDING,
    HEAD,
    LAYER,
    LINEAR,
    MLP,
    NORM,
    ROTARY,
    EnginePlant,
    Plant,
    on_engine,
)
from lab.detection.plants.updates import Rule, rule
from precision.findings import LOSS

BF16, FP16, MANIFEST = PATHS = ("bf16", "fp16", "manifest")
SKIPS: dict[str, Any] = {"paths": (FP16,), "overrides": ("precision.loss_scale.initial=262144",)}
"""Options of a defect that needs a loss scale from which a run first skips."""
WATCHED = ("guard.replica_checks=4", "guard.update_checks=65536", "guard.reexecute=every 4")
"""The checks for silent corruption; a slice as long as a rank's part, so that chance has no share in the table."""


@dataclass(frozen=True)
class Defect:
    """One of them."""

    name: str
    group: str
    plant: Plant
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
    unit: str = ""
    """Unit of a size that can be made smaller."""
    of_judge: bool = False


def engine_defect(name: str, plant: EnginePlant, *modules: str, group: str = "forward pass", **options: Any) -> Defect:
    """A defect of the engine alone."""
    return Defect(name, group, on_engine(plant), modules, **options)


def shared_defect(name: str, plant: Plant, **options: Any) -> Defect:
    """A defect that the FP32 twin has, too."""
    return Defect(f"both: {name}", "shared", plant, shared=True, **options)


def _update(name: str, make: Callable[[float], Rule], **options: Any) -> Defect:
    return Defect(name, "update", rule(make), **options)


def _bit(name: str, plant: Plant, **options: Any) -> Defect:
    given: dict[str, Any] = {"modules": (bits.HIT,), "rank": True, "size": 12.0, "unit": "bit"}
    each_step = (*WATCHED, "guard.replica_checks=1")
    return Defect(name, "flipped bit", plant, overrides=each_step, **given | options)


_JUDGE: dict[str, Any] = {"of_judge": True}
_DROPS: dict[str, Any] = {"variant": "dropout", "paths": (BF16, FP16)}
_SCALED: dict[str, Any] = {"size": 0.01, "unit": "factor 1 + x"}
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
    engine_defect("attention of one layer times 1.01", forward.scaled_attention, ATTENTION, **_SCALED, **_JUDGE),
    engine_defect("attention of all layers times 1.01", forward.scaled_attentions, ATTENTION, **_SCALED),
    engine_defect("scores of one attention times 1.01", forward.scaled_scores, ATTENTION, **_SCALED),
    engine_defect("softmax of one layer in BF16", forward.softmax_in_bf16, ATTENTION, **_JUDGE),
    engine_defect("softmax of all layers in BF16", forward.softmaxes_in_bf16, ATTENTION),
    engine_defect("causal mask of one layer lost", forward.lost_causal_mask, ATTENTION, **_JUDGE),
    engine_defect("shared keys repeated in another order", forward.repeated_key_order, ATTENTION),
    engine_defect("variance of one norm in BF16", forward.variance_in_bf16, NORM, **_JUDGE),
    engine_defect("variance of all norms in BF16", forward.variances_in_bf16, *_NORMS, **_JUDGE),
    engine_defect("eps of one norm larger by 1e-3", forward.norm_eps, NORM, size=1e-3, unit="added to a variance"),
    engine_defect("one norm times 1.01", forward.scaled_norm, NORM, **_SCALED),
    engine_defect("one projection times 1.01", forward.scaled_linear, f"{MLP}.up_proj", **_SCALED),
    engine_defect("one MLP's product times 1.01", forward.scaled_mlp, MLP, **_SCALED),
    engine_defect("embedding times 1.01", forward.scaled_embedding, EMBEDDING, **_SCALED),
    engine_defect("logits times 1.01", forward.scaled_head, HEAD, **_SCALED),
    engine_defect("activation approximated", forward.approximate_activation, f"{MLP}.act_fn", MLP),
    engine_defect("one residual dropped", forward.dropped_residual, LAYER),
    engine_defect("rotary frequencies in BF16", forward.frequencies_in_bf16, ROTARY, **_JUDGE),
    engine_defect("rotary positions in BF16", forward.positions_in_bf16, ROTARY, **_JUDGE),
    engine_defect("rotary base 1% too large", forward.rotary_base, ROTARY, **_SCALED),
    engine_defect("head untied from its embedding", forward.stale_head, HEAD, variant="tied"),
    engine_defect("cross-entropy's sum in BF16", forward.loss_in_bf16, LOSS, **_JUDGE),
    engine_defect("labels smoothed by 1%", forward.smoothed_labels, size=0.01, unit="share"),
    engine_defect("gradient of one matrix summed over ranks", gradients.summed, LINEAR, group="gradient", **_JUDGE),
    Defect(
        "gradient of one matrix dropped on one rank", "gradient", gradients.dropped_on_one_rank, (LINEAR,), **_JUDGE
    ),
    engine_defect(
        "gradient of one matrix times 1.5", gradients.scaled, LINEAR, group="gradient", size=0.5, unit="factor 1 + x"
    ),
    engine_defect(
        "gradients rounded to BF16 before the reduction", gradients.rounded, group="gradient", paths=(MANIFEST,)
    ),
    engine_defect("gradients of micro-batches summed in BF16", gradients.summed_in_bf16, group="gradient", **_JUDGE),
    engine_defect("divided by the accumulation twice", gradients.divided_twice, group="gradient"),
    engine_defect("last micro-batch dropped", gradients.dropped_last_micro_batch, group="gradient"),
    engine_defect("mean of micro-batches' means", gradients.mean_of_means, group="gradient", variant="documents"),
    engine_defect(
        "reported loss 1% too low", gradients.reported_lower, group="loss", size=0.01, unit="share", **_JUDGE
    ),
    engine_defect("loss of micro-batches summed in FP16", gradients.summed_in_fp16, group="loss", **_JUDGE),
    _update("eps inside the root", lambda size: Rule(eps_inside=True), **_JUDGE),
    _update("eps times 100", lambda size: Rule(eps=1 + size), size=99.0, unit="factor 1 + x"),
    _update("decay coupled to the gradient", lambda size: Rule(coupled=True), **_JUDGE),
    _update("decay without the learning rate", lambda size: Rule(decay_times_lr=False)),
    _update("no decay", lambda size: Rule(decay=lambda right: 0.0)),
    _update("decay on norms and embeddings", lambda size: Rule(decay=lambda right: 0.1), **_JUDGE),
    _update("bias correction a step ahead", lambda size: Rule(ahead=1), **_JUDGE),
    _update("no bias correction", lambda size: Rule(corrected=False)),
    _update("beta1 smaller by 0.05", lambda size: Rule(beta1=-size), size=0.05, unit="subtracted"),
    _update("beta2 smaller by 0.01", lambda size: Rule(beta2=-size), size=0.01, unit="subtracted"),
    _update("first moment rounded to BF16", lambda size: Rule(first=torch.bfloat16), **_JUDGE),
    _update("second moment rounded to BF16", lambda size: Rule(second=torch.bfloat16), **_JUDGE),
    _update("BF16 masters in one group", lambda size: Rule(masters=torch.bfloat16), **_JUDGE),
    _update("one group ignores the learning rate", lambda size: Rule(deaf=2e-3), **_JUDGE),
    _update("learning rate times 1.05", lambda size: Rule(lr=1 + size), size=0.05, unit="factor 1 + x"),
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
    engine_defect("overflow clamped, not skipped", state.clamped_overflow, group="loss scale", **SKIPS),
    Defect("skipped step advances the schedule", "loss scale", state.skipped_step_moves_the_schedule, **SKIPS),
    engine_defect("skipped step counts for Adam", state.skipped_step_counts_for_adam, group="loss scale", **SKIPS),
    Defect("16-bit copy stale on one rank", "state", state.stale_copy_on_one_rank, (LINEAR,), **_JUDGE),
    engine_defect("masters rounded at a load", state.masters_rounded_at_load, group="state"),
    engine_defect("moments lost at a load", state.moments_lost_at_load, group="state", **_JUDGE),
    engine_defect("Adam's count lost at a load", state.count_lost_at_load, group="state"),
    engine_defect("loss scale lost at a load", state.scale_lost_at_load, group="state", paths=(FP16,)),
    Defect("a batch used twice after a resume", "state", state.batch_used_twice, **_JUDGE),
    Defect("random numbers not restored", "state", state.random_numbers_not_restored, **_DROPS),
    Defect("same random numbers on all ranks", "state", state.same_random_numbers_on_all_ranks, **_DROPS),
    shared_defect("learning rate one step late", shared.late_rate, **_JUDGE),
    shared_defect("schedule forgets its final rate", shared.forgotten_final_rate),
    shared_defect("mean of micro-batches' means", on_engine(gradients.mean_of_means), variant="documents", **_JUDGE),
    shared_defect("mean of the ranks' means", gradients.mean_of_ranks, variant="documents"),
    shared_defect("labels shifted twice", shared.shifted_labels),
    shared_defect("packed documents not kept apart", shared.documents_not_kept_apart, variant="documents"),
    shared_defect("every two batches swapped", shared.swapped_batches),
    shared_defect("the same rows on all ranks", shared.same_rows_on_all_ranks),
    shared_defect("decay on norms and embeddings", shared.decaying_norms),
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
