"""Models that may share their matrices among ranks, and the place of a slice in the whole."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from modeling.tensor_parallel import Cut, require_shareable
from tests.support.refusals import refused
from training.checkpoint.partitions import Stored

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("kind", "given", "ranks", "problem"),
    [
        ("llama", {}, 2, None),
        ("llama", {}, 4, "its 2 key and value heads do not divide among 4 ranks"),
        ("llama", {}, 3, "its 4 attention heads do not divide among 3 ranks"),
        ("llama", {"intermediate_size": 49}, 2, "the 49 inner values of its MLP do not divide among 2 ranks"),
        ("llama", {"attention_dropout": 0.1}, 2, "attention_dropout = 0.1 would drop the same values of every"),
        ("cohere", {"use_qk_norm": True}, 2, "does not sum the gradients of the norms of use_qk_norm = true"),
        ("stablelm", {"qk_layernorm": True}, 2, "does not sum the gradients of the norms of qk_layernorm = true"),
        ("mixtral", {}, 2, "not supported for model mixtral: it is verified for cohere, cohere2, "),
    ],
)
def test_a_model_that_cannot_share_is_refused_by_name(
    kind: str, given: dict[str, Any], ranks: int, problem: str | None
) -> None:
    shape = AutoConfig.for_model(kind, **SIZES | given)
    if problem is None:
        require_shareable(shape, ranks)
        return
    said = refused(require_shareable, shape, ranks)
    assert said.startswith(f"parallel.tensor = {ranks}: not supported for model {kind}: ") and problem in said


@pytest.mark.parametrize(
    ("shape", "cut"),
    [((7, 3), Cut(0, (4, 3))), ((3, 8), Cut(1, (2, 2, 4))), ((5,), Cut(0, (3, 2))), ((2, 6), Cut(1, (3, 3)))],
)
def test_slices_make_the_whole_and_the_whole_slices(shape: tuple[int, ...], cut: Cut) -> None:
    """Every range of values, of slices that ZeRO cut into parts of 4 with padding at the end."""
    whole = torch.arange(torch.Size(shape).numel()).float().view(shape) + 1
    slices = [cut.slice_of(whole, rank) for rank in range(len(cut.sizes))]
    assert all(cut.whole(part.shape) == whole.shape for part in slices)
    places = [cut.place(part.shape, rank) for rank, part in enumerate(slices)]
    for part, place in zip(slices, places, strict=True):
        assert torch.equal(whole.view(-1)[place.in_whole(torch.arange(part.numel()))], part.reshape(-1))
    padded = [torch.cat([part.reshape(-1), torch.zeros(-part.numel() % 4)]).split(4) for part in slices]
    stored = [Stored(part.shape, each) for each, part in zip(padded, slices, strict=True)]
    joined = Stored(whole.shape, slices=stored, dimension=cut.dimension)
    assert torch.equal(joined.read(), whole)
    for one, values in ((joined, whole), *zip(stored, slices, strict=True)):
        for start in range(values.numel()):
            for length in range(1, values.numel() - start + 1):
                assert torch.equal(one.values(start, length), values.reshape(-1)[start : start + length])
