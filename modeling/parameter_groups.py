"""Groups of parameters that the optimizer treats alike: with their weight decay, learning rate and rule."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch

from config.errors import UserError
from config.optimizers import OPTIMIZERS
from config.schema import OptimizerSection
from modeling.adapter import head_weights

_EXPERTS = "Expert"
"""Part of the class names of fused experts, in every model of transformers."""
_NO_WEIGHTS = ("Norm", "Embedding", "Dora")
"""Parts of the class names of modules whose `weight` is a scale or a table; DoRA's is of magnitudes."""


def parameter_groups(model: torch.nn.Module, section: OptimizerSection) -> list[dict[str, Any]]:
    """torch's groups: `params`, and what they have in common. None is empty; frozen parameters are left out.

    weight_decay: that of weights (`_is_weight`); 0 for all else. A parameter shared by an embedding and an output head
    counts as an embedding. lr_factor: of the learning rate that the schedule gives, 1.0 but for `optimizer.groups`.
    matrix: whether they are hidden matrices and the optimizer has a rule for these: a linear layer's or router's
    weight, and the 3-D tensors of fused experts; but not the layer that makes the logits, of which an adapter may train
    a copy. moe, name: of experts that ranks share (`parallel.expert`), which DeepSpeed partitions over fewer ranks.

    Raises UserError for a group of the config that matches no parameter.
    """
    tables = [module for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    embeddings = {id(parameter) for table in tables for parameter in table.parameters(recurse=False)}
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
        decays = dimensions >= 2 and _is_weight(owner, key) and id(parameter) not in embeddings
        # not a convolution's kernel, which has three dimensions, too, nor DBRX's experts, stacked in two
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


def _is_weight(owner: str, key: str) -> bool:
    """Whether a parameter of two dimensions or more is what a layer multiplies its input by.

    owner: class of the module that has it. key: its name there. Shapes do not tell: a norm of queries may have a row
    for each head, a bias of fused experts a row for each expert, and Mamba's `A_log` and Zamba's `D` are 2-D.
    """
    if _EXPERTS in owner:
        return not key.endswith("bias")
    return key.endswith("weight") and not any(kind in owner for kind in _NO_WEIGHTS)


def group_of_each(model: torch.nn.Module, section: OptimizerSection) -> dict[int, dict[str, Any]]:
    """id of each trainable parameter, in the order of the groups, to what its group has in common."""
    groups = parameter_groups(model, section)
    common = [{key: value for key, value in group.items() if key != "params"} for group in groups]
    return {id(p): shared for group, shared in zip(groups, common, strict=True) for p in group["params"]}
