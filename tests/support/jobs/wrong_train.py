"""train.py with a mistake that a run and its FP32 twin share; one argument names it, the others are train.py's."""

import os
import sys
from dataclasses import replace
from typing import Any

import torch

import train
from data.batches import masking
from data.batches.loader import Batch
from data.corpora.mixture import Mixture
from lab.detection.plants import elsewhere, gradients, shared, state, unlisted
from lab.detection.plants.site import Plant, Site, around, around_engine, instead_of, on_engine, planted
from modeling import parameter_groups
from modeling.objectives.divergence import Distillation
from modeling.objectives.preference import Preference
from training.engine import Engine, build
from training.engine.flat_optimizer import Pieces
from training.engine.health import Evaluation
from training.engine.sharded_pieces import ShardedPieces


def ratio_of_pieces(site: Site) -> None:
    """Norms and means that an optimizer takes of a parameter are of this rank's piece of it."""
    site.patch(ShardedPieces, "sums", Pieces.sums)


def head_as_matrix(site: Site) -> None:
    """Muon's rule for hidden matrices moves the output embedding, too."""
    site.patch(parameter_groups, "head_weights", lambda model: set())


@instead_of("add_adapter", build)
def wrong_factor(right: Any, *args: Any, **options: Any) -> Any:
    """LoRA's product counts 1% too much."""
    model = right(*args, **options)
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.scaling["default"] *= 1.01
    return model


@instead_of("_shares", Mixture)
def shares_swapped(right: Any, self: Any) -> Any:
    """Each source of a mixture has another one's share."""
    return right(self)[::-1]


@shared.on_batches
def labels_of_neighbours(batch: Batch) -> Batch:
    """Each text of a micro-batch has the label, or the number, of another one."""
    further = {name: values.roll(1, 1) if name == "targets" else values for name, values in batch.further.items()}
    return replace(batch, labels=batch.labels.roll(1, 1), further=further)


@shared.on_batches
def answers_swapped(batch: Batch) -> Batch:
    """The first pair of each micro-batch takes the rejected answer for the chosen one, and its reference too."""
    both = {"input_ids": batch.input_ids, **batch.further}
    found = {name: torch.cat([values[:, :1].flip(2), values[:, 1:]], 1) for name, values in both.items()}
    return replace(batch, input_ids=found.pop("input_ids"), further=found)


@instead_of("__init__", Preference)
def wrong_beta(right: Any, self: Any, section: Any, adapter_off: Any) -> None:
    """The margin of two answers counts 1% too much."""
    right(self, replace(section, beta=1.01 * section.beta), adapter_off)


def always_masked(site: Site) -> None:
    """Every chosen token becomes the mask token."""
    site.patch(masking, "MASKED", 1.0)


@instead_of("__init__", Distillation)
def wrong_temperature(right: Any, self: Any, *, temperature: float, **options: Any) -> None:
    """Logits of teacher and student are divided by 1% more than the config says."""
    right(self, temperature=1.01 * temperature, **options)


@around_engine("evaluate")
def evaluated_in_training(engine: Engine, size: float, right: Any, batches: Any) -> Evaluation:
    """Values are dropped while the model is evaluated."""
    deepspeed: Any = engine.deepspeed
    deepspeed.eval = lambda: deepspeed.train()
    try:
        return right(batches)
    finally:
        del deepspeed.eval


def evaluated_stale(engine: Engine, size: float) -> None:
    """Evaluations are of the weights before the last update."""
    before: list[torch.Tensor] = []

    def step(right: Any, *args: Any, **options: Any) -> Any:
        before[:] = [parameter.detach().clone() for parameter in engine.model.parameters()]
        return right(*args, **options)

    def evaluate(right: Any, batches: Any) -> Evaluation:
        swap()
        try:
            return right(batches)
        finally:
            swap()

    def swap() -> None:
        for parameter, kept in zip(engine.model.parameters(), before, strict=True):
            now = parameter.detach().clone()
            parameter.data.copy_(kept)
            kept.copy_(now)

    around(engine, "step", step)
    around(engine, "evaluate", evaluate)


@around_engine("evaluate")
def evaluated_by_means(engine: Engine, size: float, right: Any, batches: Any) -> Evaluation:
    """The mean over batches of their means, not the mean over all labels."""
    losses = [right([batch]).loss for batch in batches]
    return Evaluation(sum(losses) / len(losses), None, {})


MISTAKES: dict[str, Plant] = {
    "mean_of_means": on_engine(gradients.mean_of_means),
    "same_draws": state.same_random_numbers_on_all_ranks,
    "rows_of_one_rank": elsewhere.evaluated_on_rows_of_one_rank,
    "evaluated_in_training": on_engine(evaluated_in_training),
    "evaluated_stale": on_engine(evaluated_stale),
    "evaluated_by_means": on_engine(evaluated_by_means),
    "evaluated_without_the_last": on_engine(unlisted.last_batch_dropped),
    **{
        mistake.__name__: mistake
        for mistake in (
            *(shared.late_rate, shared.swapped_batches, shared.shifted_labels, ratio_of_pieces, head_as_matrix),
            *(wrong_factor, shares_swapped, labels_of_neighbours, answers_swapped, wrong_beta, always_masked),
            wrong_temperature,
        )
    },
}

if __name__ == "__main__":
    chosen = next(word for word in sys.argv[1:] if word in MISTAKES)
    with planted(MISTAKES[chosen], rank=int(os.environ.get("RANK", "0"))):
        code = train.main([word for word in sys.argv[1:] if word != chosen])
    sys.exit(code)
