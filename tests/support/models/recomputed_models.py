"""Small models of several architectures, and what their forward passes keep in memory."""

from contextlib import nullcontext
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from config.schema import ModelSection
from modeling.build import build_model, model_config
from modeling.linear_cross_entropy import label_loss_sum

BLOCKS, VOCABULARY = 5, 64
GATED = {"hidden_size": 32, "intermediate_size": 88, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
FAMILIES = {
    "llama": GATED | {"num_key_value_heads": 1, "attention_dropout": 0.1},
    "gpt2": {"n_embd": 32, "n_layer": BLOCKS, "n_head": 2},  # with its dropout of 0.1
    "gpt_neox": GATED | {"attention_dropout": 0.1, "hidden_dropout": 0.1},
}


def build(family: str, *, attention: str = "sdpa", dtype=torch.float32, **config: Any) -> torch.nn.Module:
    """A model of five blocks, the same weights each time."""
    section = ModelSection(architecture=family, config=FAMILIES[family] | config, attention=attention)
    shape = model_config(section, vocab_size=VOCABULARY, sequence_length=256)
    return build_model(section, shape, seed=0, gather=lambda parameters: nullcontext(True)).to(dtype).train()


def tokens(sequence: int = 64) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, sequence), generator=torch.Generator().manual_seed(1))


def loss_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return label_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)


def gradients(model: torch.nn.Module, seed: int = 3) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    loss_of(model, tokens()).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


class _Made(TorchDispatchMode):
    """Every storage that an operator writes its result into."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.sizes.setdefault(StorageWeakRef(storage), storage.nbytes())
        return result


def bytes_kept(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Bytes still in memory after a forward pass, parameters and buffers aside, whoever keeps them."""
    stay = {StorageWeakRef(tensor.untyped_storage()) for tensor in (*model.parameters(), *model.buffers())}
    with _Made() as made:
        loss = loss_of(model, ids)
    kept = sum(size for storage, size in made.sizes.items() if storage not in stay and not storage.expired())
    del loss
    return kept
