"""train.py with a mistake that a run and its FP32 twin share; one argument names it, the others are train.py's."""

import os
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import train
from data import loader, masking
from data.loader import Batch
from data.mixture import Mixture
from modeling import parameter_groups
from modeling.objectives.divergence import Distillation
from modeling.objectives.preference import Preference
from training import session, step
from training.engine import build
from training.engine.defects import Defects
from training.engine.engine import Engine
from training.engine.pieces import Pieces, ShardedPieces


def late_rate() -> None:
    """Each update has the learning rate of the one before."""
    right = step.scheduled_rate
    step.scheduled_rate = lambda config, applied: right(config, max(applied - 1, 0))


def mean_of_means() -> None:
    """The loss is the mean over micro-batches of their means, not the mean over all labels."""
    forward_backward, weighted = Engine.forward_backward, Defects.weighted

    def remember(self: Any, batch: Batch, **options: Any) -> Any:
        self._defects.counts = (batch.labels != loader.IGNORED_LABEL).sum(dim=(1, 2))
        return forward_backward(self, batch, **options)

    def wrong(self: Any, weight: torch.Tensor, micro_batch: int) -> torch.Tensor:
        return weighted(self, weight, micro_batch) * self.counts.double().mean() / self.counts[micro_batch]

    Engine.forward_backward, Defects.weighted = remember, wrong  # type: ignore[method-assign]


def swapped_batches() -> None:
    """The two batches of each pair are swapped."""
    right = loader.sample_ids
    loader.sample_ids = lambda position, **options: right(position ^ 1, **options)


def ratio_of_pieces() -> None:
    """Norms and means that an optimizer takes of a parameter are of this rank's piece of it."""
    ShardedPieces.sums = Pieces.sums  # type: ignore[method-assign]


def head_as_matrix() -> None:
    """Muon's rule for hidden matrices moves the output embedding, too."""
    parameter_groups.head_weights = lambda model: set()


def wrong_factor() -> None:
    """LoRA's product counts 1% too much."""
    right = build.add_adapter

    def wrong(*args: Any, **options: Any) -> Any:
        model = right(*args, **options)
        for module in model.modules():
            if hasattr(module, "lora_A"):
                module.scaling["default"] *= 1.01
        return model

    build.add_adapter = wrong  # type: ignore[assignment]


def shares_swapped() -> None:
    """Each source of a mixture has another one's share."""
    right = Mixture._shares
    Mixture._shares = lambda self: right(self)[::-1]  # type: ignore[method-assign]


def _change_batches(change: Callable[[Batch], Batch]) -> None:
    right = loader.Batches.next_step
    loader.Batches.next_step = lambda self: change(right(self))  # type: ignore[method-assign]


def shifted_labels() -> None:
    """Each label is the token after the next one."""
    _change_batches(lambda batch: replace(batch, labels=torch.roll(batch.labels, -1, dims=-1)))


def labels_of_neighbours() -> None:
    """Each text of a micro-batch has the label, or the number, of another one."""

    def wrong(batch: Batch) -> Batch:
        further = {name: values.roll(1, 1) if name == "targets" else values for name, values in batch.further.items()}
        return replace(batch, labels=batch.labels.roll(1, 1), further=further)

    _change_batches(wrong)


def answers_swapped() -> None:
    """In the first pair of each micro-batch, the rejected answer is taken for the chosen one, its reference too."""

    def wrong(batch: Batch) -> Batch:
        both = {"input_ids": batch.input_ids, **batch.further}
        found = {name: torch.cat([values[:, :1].flip(2), values[:, 1:]], 1) for name, values in both.items()}
        return replace(batch, input_ids=found.pop("input_ids"), further=found)

    _change_batches(wrong)


def wrong_beta() -> None:
    """The margin of two answers counts 1% too much."""
    right = Preference.__init__

    def wrong(self: Any, section: Any, adapter_off: Any) -> None:
        right(self, replace(section, beta=1.01 * section.beta), adapter_off)

    Preference.__init__ = wrong  # type: ignore[method-assign]


def always_masked() -> None:
    """Every chosen token becomes the mask token."""
    masking.MASKED = 1.0


def wrong_temperature() -> None:
    """Logits of teacher and student are divided by 1% more than the config says."""
    right = Distillation.__init__

    def wrong(self: Any, *, temperature: float, **options: Any) -> None:
        right(self, temperature=1.01 * temperature, **options)

    Distillation.__init__ = wrong  # type: ignore[method-assign]


def same_draws() -> None:
    """All ranks drop the same values."""
    right = session.seed_everything
    session.seed_everything = lambda seed: right(seed - int(os.environ.get("RANK", 0)))


def rows_of_one_rank() -> None:
    """Every rank evaluates the rows of the first one."""
    right = session.validation_batches
    session.validation_batches = lambda split, **options: right(split, **{**options, "rank": 0})


MISTAKES: dict[str, Callable[[], None]] = {
    mistake.__name__: mistake
    for mistake in (
        *(late_rate, mean_of_means, swapped_batches),
        *(ratio_of_pieces, head_as_matrix, wrong_factor, shares_swapped),
        *(shifted_labels, labels_of_neighbours, answers_swapped, wrong_beta, always_masked, wrong_temperature),
        *(same_draws, rows_of_one_rank),
    )
}

if __name__ == "__main__":
    chosen = next(word for word in sys.argv[1:] if word in MISTAKES)
    MISTAKES[chosen]()
    sys.exit(train.main([word for word in sys.argv[1:] if word != chosen]))
