"""Defects that were thought of after the judge had been finished: first tried on it as it was, each in two runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lab.detection.defects import BF16, FP16, HIGH_SCALE, MANIFEST, WATCHED, Defect
from lab.detection.plants import elsewhere, later
from lab.detection.plants.elsewhere import ADAPTED, DROPOUT
from lab.detection.plants.site import ATTENTION, EMBEDDING, HEAD, LAYER, LINEAR, MLP, Plant, on_engine
from precision.findings import LOSS
from training.engine import Engine

GELU = "transformer.h.1.mlp.act"
_TWO = (BF16, FP16)
_EXACT = (MANIFEST, BF16)


def _engine(name: str, plant: Callable[[Engine, float], None], *modules: str, **options: Any) -> Defect:
    return Defect(name, options.pop("group", "forward pass"), on_engine(plant), modules, **{"paths": _TWO} | options)


def _site(name: str, group: str, plant: Plant, *modules: str, **options: Any) -> Defect:
    return Defect(name, group, plant, modules, **{"paths": _TWO} | options)


_DROPS: dict[str, Any] = {"variant": "dropout"}
_GRADIENT: dict[str, Any] = {"group": "gradient"}
_UPDATE: dict[str, Any] = {"group": "update"}
LATER = (
    _engine("rotary base of one layer 1% too large", later.rotary_base_of_one_layer, ATTENTION, size=0.01),
    _engine("one head sees the next token", later.one_head_sees_the_next_token, ATTENTION),
    _engine("one head forgets the first token", later.one_head_forgets_the_first_token, ATTENTION, paths=_EXACT),
    _engine("scores of one attention capped at 50", later.scores_capped, ATTENTION, size=50.0),
    _engine("SiLU of one layer is a GELU", later.silu_is_gelu, f"{MLP}.act_fn", MLP, paths=_EXACT),
    _engine("residual of one block times 0.999", later.scaled_residual, LAYER, size=0.001),
    _engine("head's gradient lost to the embedding it shares", later.head_deaf_to_gradients, HEAD, variant="tied"),
    _engine("dropout not divided by what is kept", later.dropout_not_scaled, DROPOUT, **_DROPS),
    _engine("dropout of one place 0.15, not 0.1", later.other_dropout, DROPOUT, size=0.05, **_DROPS),
    _site("dropout while evaluated", "loss", later.dropout_while_evaluated, **_DROPS),
    _site("both: labels of one row in 16 shifted by two", "shared", later.shifted_labels_of_some, size=16, shared=True),
    _site("both: one row on both ranks", "shared", later.repeated_row, shared=True),
    _site("both: last label of each row lost", "shared", later.last_label_lost, shared=True),
    _site("labels of one row in 16 shifted by two", "shared", later.shifted_labels_of_some, size=16),
    _site(
        "ignored labels counted on one rank",
        "gradient",
        later.counts_ignored_labels_on_one_rank,
        variant="documents",
    ),
    _site("last micro-batch dropped on one rank", "gradient", later.dropped_last_micro_batch_on_one_rank),
    _engine("embedding left out of the norm", later.embedding_left_out_of_the_norm, **_GRADIENT),
    _engine("gradients clipped value by value", later.clipped_value_by_value, EMBEDDING, size=0.02, **_GRADIENT),
    _site("betas of one group exchanged", "update", later.swapped_betas_of_one_group),
    _site("decay twice what it should be", "update", later.doubled_decay_of_one_group),
    _site("momentum one step old on one rank", "update", later.stale_momentum_on_one_rank),
    _engine("last value of each rank's part not updated", later.last_value_not_updated, **_UPDATE),
    _engine("16-bit copy of one matrix cut off, not rounded", later.truncated_copies, f"{MLP}.down_proj", **_UPDATE),
    _site(
        "good steps counted through overflows",
        "loss scale",
        later.growth_counted_through_overflows,
        paths=(FP16,),
        overrides=HIGH_SCALE,
    ),
    _engine("Adam's count one ahead after a load", later.count_ahead_at_load, group="state"),
    _engine("moments of two matrices exchanged at a load", later.exchanged_moments_at_load, group="state"),
    _engine("second moment decayed twice at load", later.moment_decayed_once_more_at_load, group="state", size=0.95),
    _site("learning rate one step back after a resume", "state", later.rate_one_step_back_after_a_resume),
    # what other trainers and kernels had
    _engine("both: rotary scaling dropped", elsewhere.rotary_scaling_dropped, variant="scaled rotary", shared=True),
    _engine("window of one layer one token too long", elsewhere.window_too_long, ATTENTION, variant="window"),
    _engine("cap of the final logits left out", elsewhere.final_cap_left_out, LOSS, variant="gemma2"),
    _engine("queries and keys turned before their norms", elsewhere.norm_after_rotation, ATTENTION, variant="qwen3"),
    _engine("GELU of one layer exact, not by tanh", elsewhere.exact_gelu, GELU, variant="gpt2"),
    _engine("both: positions count on", elsewhere.positions_count_on, variant="gpt2 documents", shared=True),
    _engine("other values dropped in recomputation", elsewhere.dropped_anew_in_recomputation, variant="recomputed"),
    _engine("one place drops the same values always", elsewhere.one_mask_for_all, DROPOUT, **_DROPS),
    _engine(
        "embedding of the end token not trained", elsewhere.end_token_without_a_gradient, EMBEDDING, variant="short"
    ),
    _engine("adapter of one layer by sqrt(r)", elsewhere.adapter_by_the_root_of_its_rank, ADAPTED, variant="lora"),
    _engine("frozen layer merged and unmerged", elsewhere.base_merged_and_unmerged, ADAPTED, variant="lora"),
    _engine("reference trained along", elsewhere.reference_trained_along, group="loss", variant="dpo"),
    _engine(
        "both: reference trained along", elsewhere.reference_trained_along, group="loss", variant="dpo", shared=True
    ),
    _engine("beta of preferences 0.1% larger", elsewhere.other_constant, group="loss", variant="dpo", size=1e-3),
    _engine("noise on embeddings 0.1% larger", elsewhere.other_constant, group="loss", variant="noise", size=1e-3),
    _site("both: end of answers not learned", "shared", elsewhere.end_of_answers_lost, variant="sft", shared=True),
    _site("both: same order in every epoch", "shared", elsewhere.same_order_in_every_epoch, variant="few", shared=True),
    _site("both: evaluated on rows of one rank", "shared", elsewhere.evaluated_on_rows_of_one_rank, shared=True),
    _engine("z-loss summed over micro-batches", elsewhere.z_loss_summed_over_micro_batches, **_GRADIENT, variant="moe"),
    _engine("gradient of the step before, in step 11", elsewhere.gradient_of_the_step_before, size=11, **_GRADIENT),
    _engine(
        "gradient of the step before, in step 12, watched",
        elsewhere.gradient_of_the_step_before,
        LINEAR,
        size=12,
        overrides=WATCHED,
        **_GRADIENT,
    ),
    _site("Newton-Schulz one iteration short", "update", elsewhere.four_iterations, variant="muon"),
    _site("both: Newton-Schulz one iteration short", "update", elsewhere.four_iterations, variant="muon", shared=True),
    _engine(
        "decay of the first step after a load",
        elsewhere.other_decay_in_the_first_step_after_a_load,
        group="state",
        size=0.01,
    ),
)
"""Defects in the order of the page. They are planted in the run alone, unless one says *both*."""
