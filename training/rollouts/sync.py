"""Proof by hash, before a token is sampled, that the sampler computes with the trainer's weights.

The trainer's side is the weights that its own modules compute with, under every name of a tied tensor. Each rank hashes
a share; a copy in this process is compared bit for bit, as are other numbers that modules compute with. If anything
differs, everything is sent once more; then the run ends.
"""

import hashlib
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel

from config.printable import first_of
from training.engine import Engine
from training.engine.flips import bit_sums
from training.engine.ledger import PrecisionError
from training.engine.tensors import whole_weight
from training.rollouts.transformers_sampler import TransformersSampler, Weights, differing_from, digest

_ATTEMPTS, _shown = 2, partial(first_of, most=5)


def synchronise(engine: Engine, sampler: TransformersSampler) -> str:
    """Send the trainer's weights, prove that the sampler computes with them, and return their version: a hash over the
    names and hashes of all tensors. A collective. Raises PrecisionError."""
    world, settings = engine.world, _settings(engine.model)
    other = [name for name, value in _settings(sampler.model).items() if settings.get(name, value) != value]
    if other:
        raise PrecisionError(f"the sampler has other settings than the trainer: {_shown(other)}; nothing was sampled")
    for _ in range(_ATTEMPTS):
        share: dict[str, str] = {}
        sampler.receive(_weights(engine, share, sampler.frozen))
        expected = {name: known for part in world.gather_objects(share) for name, known in part.items()}
        own = sampler.differing(_weights(engine), expected)
        wrong = sorted({name for names in world.gather_objects(own) for name in names})
        if not wrong:
            text = "\n".join(f"{name} {expected[name]}" for name in sorted(expected))
            return hashlib.sha256(text.encode()).hexdigest()
    where = f"in {len(wrong)} of {len(expected)} tensors, after they were sent {_ATTEMPTS} times: {_shown(wrong)}"
    raise PrecisionError(f"the sampler computes with other weights than the trainer {where}; nothing was sampled")


def require_start(engine: Engine, reference: PreTrainedModel) -> None:
    """Raises PrecisionError if the model of grpo.beta has other weights or dtypes than the engine starts with."""
    if wrong := differing_from(reference, _weights(engine)):
        what = f"another dtype or other weights than the trainer at the start in {len(wrong)} tensors"
        raise PrecisionError(f"the reference of grpo.beta has {what}: {_shown(wrong)}; nothing was sampled")


def _settings(model: torch.nn.Module) -> dict[str, Any]:
    """Numbers that modules compute with besides weights, such as an adapter's scale, and the bit sums of buffers."""
    numbers, buffers = dict[str, Any](), dict[str, torch.Tensor]()
    for name, module in model.named_modules():
        rope = str(getattr(module, "rope_type", ""))  # Gemma 3 has one for each type of layer
        if "dynamic" in rope or "longrope" in rope:  # its frequencies depend on the sequences it has seen
            continue
        for key, value in vars(module).items():
            kinds = {type(part) for part in (value.values() if type(value) is dict else [value])}
            if kinds and kinds <= {int, float}:
                numbers[f"{name}.{key}"] = value
        for key, buffer in module.named_buffers(recurse=False):
            buffers[f"{name}.{key}"] = buffer.detach().clone()  # aligned alike in both models (`bit_sum`)
    return numbers | bit_sums(buffers)


def _weights(engine: Engine, share: dict[str, str] | None = None, frozen: dict[str, str] | None = None) -> Weights:
    """Every parameter's whole weight under each of its names. share: takes the digests that this rank computes.
    frozen: keeps those of weights that are not trained."""
    names: dict[torch.nn.Parameter, list[str]] = {}
    for name, parameter in engine.model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for number, (parameter, tied) in enumerate(names.items()):
        whole = whole_weight(engine, parameter) if engine.stage == 3 else parameter.data  # whole_weight copies
        if share is not None and frozen is not None and number % engine.world.world_size == engine.world.rank:
            known = frozen.get(tied[0]) or digest(whole)
            if not parameter.requires_grad:
                frozen[tied[0]] = known
            share |= dict.fromkeys(tied, known)
        yield from ((name, whole) for name in tied)
