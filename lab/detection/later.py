"""Defects that were thought of after the judge had been finished: first tried on it as it was, each in two runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from lab.detection.defects import BF16, FP16, MANIFEST, SKIPS, WATCHED, Defect, engine_defect, shared_defect
from lab.detection.plants import elsewhere, later, unlisted
from lab.detection.plants.elsewhere import ADAPTED, DROPOUT
from lab.detection.plants.site import ATTENTION, EMBEDDING, HEAD, LAYER, LINEAR, MLP, NORM, ROTARY, Plant, on_engine
from precision.findings import LOSS

GELU = "transformer.h.1.mlp.act"
_TWO = (BF16, FP16)
_EXACT = (MANIFEST, BF16)

_engine = partial(engine_defect, paths=_TWO)
_both = partial(shared_defect, paths=_TWO)


def _site(name: str, group: str, plant: Plant, *modules: str, **options: Any) -> Defect:
    return Defect(name, group, plant, modules, **{"paths": _TWO} | options)


def _constant(name: str, module: str, key: str, change: Callable[[Any], Any], **options: Any) -> Defect:
    return _engine(name, unlisted.constant(key, module, change), module, **options)


def _larger(name: str, module: str, size: float, parameter: str = "weight", **options: Any) -> Defect:
    plant = unlisted.gradient_of(f"{module}.{parameter}")
    return _engine(name, plant, module, size=size, group="gradient", **options)


CONVOLUTION, ROUTER = "transformer.h.1.mlp.c_fc", "model.layers.1.mlp.gate"
_SLOW_NORMS = ("optimizer.groups=[{match: '*norm*', learning_rate: 1.0e-4}]",)
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
    _engine("dropout while evaluated", later.dropout_while_evaluated, group="loss", **_DROPS),
    _both("labels of one row in 16 shifted by two", later.shifted_labels_of_some),
    _both("one row on both ranks", later.repeated_row),
    _both("last label of each row lost", later.last_label_lost),
    _site("labels of one row in 16 shifted by two", "shared", later.shifted_labels_of_some),
    _site(
        "ignored labels counted on one rank", "gradient", later.counts_ignored_labels_on_one_rank, variant="documents"
    ),
    _site("last micro-batch dropped on one rank", "gradient", later.dropped_last_micro_batch_on_one_rank),
    _engine("embedding left out of the norm", later.embedding_left_out_of_the_norm, **_GRADIENT),
    _engine("gradients clipped value by value", later.clipped_value_by_value, EMBEDDING, size=0.02, **_GRADIENT),
    _engine("betas of one group exchanged", later.swapped_betas_of_one_group, **_UPDATE),
    _engine("decay twice what it should be", later.doubled_decay_of_one_group, **_UPDATE),
    _site("momentum one step old on one rank", "update", later.stale_momentum_on_one_rank),
    _engine("last value of each rank's part not updated", later.last_value_not_updated, **_UPDATE),
    _engine("16-bit copy of one matrix cut off, not rounded", later.truncated_copies, f"{MLP}.down_proj", **_UPDATE),
    _site("good steps counted through overflows", "loss scale", later.growth_counted_through_overflows, **SKIPS),
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
    _both("end of answers not learned", elsewhere.end_of_answers_lost, variant="sft"),
    _both("same order in every epoch", elsewhere.same_order_in_every_epoch, variant="few"),
    _both("evaluated on rows of one rank", elsewhere.evaluated_on_rows_of_one_rank),
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
    # what no list had: tried on plain runs
    _both("labels of two rows exchanged", unlisted.labels_of_two_rows_exchanged),
    _both("positions from one", unlisted.positions_from_one, variant="documents"),
    _both("documents glued two by two", unlisted.glued_documents, variant="documents"),
    _both("ends of documents predict", unlisted.labels_everywhere, variant="documents"),
    _both("prompts learned", unlisted.labels_everywhere, variant="sft"),
    _both("every fourth batch twice", unlisted.every_fourth_batch_twice),
    _both("one rank a batch behind", unlisted.one_rank_a_batch_behind),
    _both("first token of rows lost", unlisted.first_token_lost),
    _both("an epoch filled up with its start", unlisted.epoch_filled_up, variant="few"),
    _engine("last labels of a micro-batch lost", unlisted.last_labels_lost, size=8, group="loss"),
    _site("divided by old labels", "loss", unlisted.divided_by_old_labels, variant="documents"),
    _both("rate a step early", unlisted.rate_a_step_early),
    _both("schedule of twice the steps", unlisted.rate_of_twice_the_steps),
    _both("linear for cosine", unlisted.linear_for_cosine),
    _site("rate a step early on one rank", "update", unlisted.rate_a_step_early_on_one_rank),
    _site("masters of one rank stay every third step", "update", unlisted.masters_stay_every_third_step),
    _site("second moment of one rank frozen", "update", unlisted.second_moment_frozen),
    _engine("one value in 4,096 not updated", unlisted.borders_of_blocks_skipped, size=4096, **_UPDATE),
    _engine("decay after the update", unlisted.decay_after_the_update, **_UPDATE),
    _engine("rate of a group lost", unlisted.rate_of_a_group_lost, overrides=_SLOW_NORMS, **_UPDATE),
    _engine("norms' gradients summed over ranks", unlisted.norms_summed, NORM, **_GRADIENT),
    _larger("gradient of one norm 20% too large", NORM, 0.2),
    _larger("half of a bias' gradient", CONVOLUTION, -0.5, "bias", variant="gpt2"),
    _larger("gradient of a convolution 20% too large", CONVOLUTION, 0.2, variant="gpt2"),
    _engine("last 512 values of a gradient lost", unlisted.tail_of_a_gradient_lost, LINEAR, size=512, **_GRADIENT),
    _engine("gradient lost every 16th step", unlisted.gradient_lost_every_16th_step, LINEAR, **_GRADIENT),
    _engine("last of equal tokens wins", unlisted.last_token_wins, EMBEDDING, **_GRADIENT),
    _engine("half of the head's gradient", unlisted.half_of_the_head_gradient, HEAD, variant="tied", **_GRADIENT),
    _engine("a tenth of an MLP's gradient lost", unlisted.gradient_through_an_mlp, MLP, size=0.1, **_GRADIENT),
    _engine("keys without a gradient", unlisted.keys_without_a_gradient, f"{ATTENTION}.k_proj", **_GRADIENT),
    _site("scale grows a step early", "loss scale", unlisted.grows_a_step_early, paths=(FP16,)),
    _site("overflow divides the scale by four", "loss scale", unlisted.backs_off_by_four, **SKIPS),
    _engine("copies every fourth step", unlisted.copies_every_fourth_step, group="state"),
    _engine("copy of the embedding frozen", unlisted.frozen_embedding, EMBEDDING, group="state"),
    _site("half of a gathered weight stale", "state", unlisted.half_a_weight_stale, LINEAR, rank=True),
    _constant("scale of one attention 1% too large", ATTENTION, "scaling", lambda value: 1.01 * value),
    _constant("eps of one norm 100 times larger", NORM, "variance_epsilon", lambda value: 100 * value),
    _engine(
        "scale of the embedding 1% too large", unlisted.scale_of_the_embedding, EMBEDDING, variant="gemma3", size=0.01
    ),
    _engine("window of the config one too long", unlisted.window_of_the_config, variant="window"),
    _constant("dropout of one place off", DROPOUT, "p", lambda value: 0.0, **_DROPS),
    _site("mask leaks one token", "forward pass", unlisted.mask_leaks),
    _site("documents see each other", "forward pass", unlisted.documents_see_each_other, variant="documents"),
    _engine("positions off in the decoder", unlisted.positions_off_in_the_decoder, ROTARY),
    _engine("positions off in the table", unlisted.positions_off_in_the_table, ROTARY),
    _engine("1% lost between two blocks", unlisted.lost_between_blocks, LAYER, size=0.01),
    _engine("1% more before the head", unlisted.larger_before_the_head, HEAD, size=0.01),
    _engine("one head gives nothing", unlisted.zero_head, ATTENTION),
    _engine("RMSNorm subtracts the mean", unlisted.centred_norm, NORM),
    _engine("norm off after twelve steps", unlisted.norm_off_later, NORM, size=0.01),
    _engine("balancing loss lost", unlisted.balance_lost, variant="moe"),
    _constant("experts' shares not normalised", ROUTER, "norm_topk_prob", lambda value: not value, variant="moe"),
    _both("evaluation: mean of batches", on_engine(unlisted.mean_of_batches), variant="documents"),
    _both("evaluation without its last batch", on_engine(unlisted.last_batch_dropped)),
    _both("evaluation with its last batch twice", on_engine(unlisted.last_batch_twice)),
    _engine("norm 2% off in evaluations", unlisted.norm_off_in_evaluations, NORM, size=0.02),
    _site("moments of one rank lost at a load", "state", unlisted.moments_of_one_rank_lost),
    _engine("clipping lost at a load", unlisted.clipping_lost_at_load, group="state"),
)
"""Defects in the order of the page. They are planted in the run alone, unless one says *both*."""
