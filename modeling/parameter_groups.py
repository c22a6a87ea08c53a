"""Groups of parameters that the optimizer treats alike: the same weight decay, learning rate and update rule."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from transformers import PreTrainedModel

from config.errors import UserError
from config.optimizers import OPTIMIZERS
from config.schema import OptimizerSection
from modeling.adapter import head_weights

_EXPERTS = "Expert"
"""Part of the class names of fused experts, in every model of transformers."""
_NO_WEIGHTS = ("Norm", "Embedding", "Dora")
"""Parts of the class names of modules whose `weight` is a scale or a table; DoRA's holds magnitudes."""


def parameter_groups(model: torch.nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """torch's parameter groups: `params` and their options. No group is empty; frozen parameters are left out.

    weight_decay: 0 for all but weights (`_is_weight`) that a text reaches, unless `optimizer.groups` sets it. A
    parameter shared by an embedding and an output head counts as an embedding. lr_factor: on the scheduled learning
    rate, 1.0 unless `optimizer.groups` sets it. matrix: whether these are hidden matrices and the optimizer has a rule
    for them: weights of linear layers and routers, and 3-D tensors of fused experts, but not the layer that computes
    the logits nor an adapter's copy of it. moe, name: for experts of `parallel.expert`, which DeepSpeed partitions over
    fewer ranks.

    Raises UserError for a group of the config that matches no parameter.
    """
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    kept = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
    kept |= {id(parameter) for parameter in unreached(model).values()}
    head = head_weights(model)
    owners = dict(model.named_modules())
    splits = OPTIMIZERS[section.name].splits_matrices
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    matched = [False] * len(section.groups)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))
        path, _, key = name.rpartition(".")
        owner = type(owners[path]).__name__
        decays = dimensions >= 2 and _is_weight(owner, key) and id(parameter) not in kept
        # not a convolution's kernel, which also has three dimensions, nor DBRX's experts, stacked in two
        is_matrix = dimensions == 2 and key == "weight" or dimensions == 3 and _EXPERTS in owner
        matrix = splits and decays and is_matrix and id(parameter) not in head
        own = max((i for i, group in enumerate(section.groups) if fnmatchcase(name, group.match)), default=-1)
        decay, factor = section.weight_decay if decays else 0.0, 1.0
        if own >= 0:
            matched[own], chosen = True, section.groups[own]
            decay = decay if chosen.weight_decay is None else chosen.weight_decay
            factor = 1.0 if chosen.learning_rate is None else chosen.learning_rate / section.learning_rate
        options = {"weight_decay": decay, "lr_factor": factor, "matrix": matrix}
        experts = getattr(parameter, "group_name", None)
        if experts is not None:
            options |= {"moe": True, "name": experts}
        groups.setdefault((not matrix, not decays, own, experts or ""), {"params": [], **options})["params"].append(
            parameter
        )
    for group, found in zip(section.groups, matched, strict=True):
        if not found:
            example = next(name for name, parameter in model.named_parameters() if parameter.requires_grad)
            raise UserError(
                f"optimizer.groups: match '{group.match}' is the last match of no trained parameter; names are "
                f"like {example}"
            )
    return [groups[key] for key in sorted(groups)]


def unreached(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters by name that get no gradient from text: the encoders of a multimodal model, such as Gemma 3's for
    images. ZeRO gives the optimizer zeros for these, with which a parameter that does not decay keeps its value."""
    if not isinstance(model, PreTrainedModel) or model.config.is_encoder_decoder:
        return {}
    if model.config.get_text_config(decoder=True) is model.config:
        return {}
    reached = {id(parameter) for parameter in model.get_decoder().parameters()} | head_weights(model)
    idle = {id(parameter) for parameter in model.base_model.parameters()} - reached
    return {name: parameter for name, parameter in model.named_parameters() if id(parameter) in idle}


def unreached_notes(model: torch.nn.Module) -> list[str]:
    """A human-readable note on the trainable parameters among these, which take memory all the same."""
    trainable = [name for name, parameter in unreached(model).items() if parameter.requires_grad]
    modules = dict.fromkeys(".".join(name.split(".")[:2]) for name in trainable)
    return [f"no text reaches {', '.join(modules)}: they get no gradient and no weight decay"] if modules else []


def _is_weight(owner: str, key: str) -> bool:
    """Whether a parameter of two or more dimensions is one that a layer multiplies its input by.

    owner: class name of the module that has it. key: its name there. Shapes cannot tell: a norm of queries may have a
    row per head, a bias of fused experts a row per expert, and Mamba's `A_log` and Zamba's `D` are 2-D.
    """
    if _EXPERTS in owner:
        return not key.endswith("bias")
    return key.endswith("weight") and not any(kind in owner for kind in _NO_WEIGHTS)


def group_of_each(model: torch.nn.Module, section: OptimizerSection) -> dict[int, dict[str, Any]]:
    """Maps the id of each trainable parameter, in the order of the groups, to the options of its group."""
    groups = parameter_groups(model, section)
    common = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {id(p): shared for group, shared in zip(groups, common, strict=True) for p in group["params"]}
