"""Attention over shared sequences; run on real ranks by test_sequence_parallel.py.

The oracle is the same model without the wrapper on whole sequences, with transformers' own masks.
"""

from typing import Any

import torch

from config.batch import WHOLE_POSITIONS
from config.errors import UserError
from modeling.sequence_parallel import SequenceAttention, require_equal_logits
from tests.support.models.small_models import distance, small_model
from training.distributed import SliceGroup, World

LENGTH = 22
"""[tokens] Longer than the windows."""


def against_the_whole(world: World, *, family: str, apart: bool, ranks: int, shape: dict[str, Any]) -> dict[str, float]:
    """Largest error of the logits of this rank's slice over the largest logit, and that of the gradients' sum.

    unused: the same of the model's own pass once the wrapper is there, which has to be its own.
    """
    world = world.sharing_sequences(ranks, timeout_minutes=2)
    group, model = world.sequence, small_model(family, **shape)
    assert group is not None
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # at 0.02 attention is next to uniform, and a wrong mask does little
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    ids = torch.randint(61, (2, LENGTH), generator=generator)
    length = -(-LENGTH // ranks) * ranks
    ids = torch.nn.functional.pad(ids, (0, length - LENGTH))
    positions = (torch.arange(length) % (7 if apart else length)).expand(ids.shape)
    whole = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    whole.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    attention = SequenceAttention(model, group, apart=apart)
    each = length // ranks
    mine = slice(group.rank * each, (group.rank + 1) * each)
    inputs = {"input_ids": ids[:, mine], "position_ids": positions[:, mine], WHOLE_POSITIONS: positions}
    logits = model(**inputs, use_cache=False).logits
    (logits.square().sum() / whole.numel()).backward()
    groups = world.world_size // ranks  # that do the same
    found = {name: world.sum(p.grad) / groups for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        own = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    attention.close()
    largest = float(whole.abs().max())
    return {
        "logits": float((logits - whole[:, mine]).abs().max()) / largest,
        "gradients": distance(found, expected),
        "unused": float((own - whole).abs().max()) / largest,
        "name": model.config._attn_implementation,
    }


class Idle(SliceGroup):
    """Ranks that trade nothing."""

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return rows


def refused(world: World, *, family: str, shape: dict[str, Any], idle: bool = False) -> str:
    """The error for a model, from its config or from comparing logits; empty: none."""
    world = world.sharing_sequences(2, timeout_minutes=2)
    group, model = world.sequence, small_model(family, **shape).eval()
    assert group is not None
    try:
        group = Idle(group.rank, group.size, group.group) if idle else group
        SequenceAttention(model, group, apart=False)
        found = require_equal_logits(
            lambda inputs: model(**inputs, use_cache=False).logits,
            model.config,
            group,
            torch.device("cpu"),
            apart=False,
            largest=1e-3,
        )
    except UserError as error:
        return str(error)
    return next((text for text in world.gather_objects(found) if text), "")
