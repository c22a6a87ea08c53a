"""The settings that each parameter gets from the optimizer's section, independently of modeling/parameter_groups.py."""

from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from config.schema import OptimizerSection


def decay_and_factor(model: Any, section: OptimizerSection) -> dict[str, tuple[float, float]]:
    """Weight decay and factor of the scheduled learning rate for each trained parameter, by name.

    model: with whole parameters. Only weights that multiply a layer's input decay, if that comes from text; embeddings
    do not.
    """
    weights, found = _weights(model), {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        usual = section.weight_decay if id(parameter) in weights else 0.0
        decay, factor = usual, 1.0
        for group in section.groups:
            if fnmatchcase(name, group.match):  # the last match wins
                decay = usual if group.weight_decay is None else group.weight_decay
                factor = 1.0 if group.learning_rate is None else group.learning_rate / section.learning_rate
        found[name] = decay, factor
    return found


def _weights(model: Any) -> dict[int, bool]:
    """Ids of the parameters by which layers multiply their inputs, without embeddings and what reads images or sound;
    to whether each is a matrix, or a matrix for each expert."""
    found: dict[int, bool] = {}
    for module in model.modules():
        kind, own = type(module).__name__, dict(module.named_parameters(recurse=False))
        weight = own.get("weight")
        if isinstance(module, nn.Linear | Conv1D) or kind.lower().endswith(("router", "linear")) and weight is not None:
            found[id(weight)] = True
        elif isinstance(module, _ConvNd):
            found[id(weight)] = False
        elif "Expert" in kind:
            stacks = [tensor for key, tensor in own.items() if "bias" not in key and tensor.dim() > 1]
            found |= {id(tensor): tensor.dim() == 3 for tensor in stacks}
        else:  # block-diagonal gates and the like
            found |= {id(tensor): False for key, tensor in own.items() if key.endswith("_weight") and tensor.dim() > 1}
    for module in model.modules():
        if isinstance(module, nn.Embedding) or "Embedding" in type(module).__name__:
            found.pop(id(getattr(module, "weight", None)), None)
    text = type(model.config.get_text_config(decoder=True))
    if text is not type(model.config) and not model.config.is_encoder_decoder:
        of_text = [one for one in model.modules() if isinstance(one, PreTrainedModel) and type(one.config) is text]
        read = {id(tensor) for one in of_text for tensor in one.parameters()}
        for tensor in model.base_model.parameters():
            if id(tensor) not in read:
                found.pop(id(tensor), None)
    return found


def hidden_matrices(model: Any, section: OptimizerSection) -> set[str]:
    """Names of the parameters that Muon's own rule updates; none for another optimizer.

    The weights of linear layers except the output embedding, of routers, and of fused experts, one matrix per expert.
    """
    if section.name != "muon":
        return set()
    head, weights = model.get_output_embeddings(), _weights(model)
    named = model.named_parameters()
    return {name for name, item in named if weights.get(id(item)) and (head is None or item is not head.weight)}
