"""One parameter's master, moments, gradient and computing weight, whole, wherever ZeRO keeps their parts.

Every function is a collective that hands the same tensor to every rank. For looking at, a parameter at a time: nothing
here belongs on the path of a training step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

from training.engine.engine import Engine
from training.engine.masters import local_masters


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """The parameter's shape, also where ZeRO-3 left an empty tensor in its place."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole_gradient(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The reduced gradient, FP32, unscaled; between backward and step. None for a parameter without one."""
    gradient = parameter.grad if engine.stage == 0 else safe_get_full_grad(parameter)
    return None if gradient is None else gradient.detach().float() / engine.loss_scale


def whole_master(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy of the FP32 master in the parameter's shape."""
    master = parameter.data if engine.stage == 0 else safe_get_full_fp32_param(parameter)
    return master.detach().float().clone().view(shape_of(parameter))


def whole_moment(engine: Engine, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    """A copy of the optimizer's `name` (exp_avg or exp_avg_sq), FP32. There is none before the first applied step."""
    if engine.stage == 0:
        moment = engine.deepspeed.optimizer.state[parameter][name]
    elif engine.stage == 3:
        moment = safe_get_full_optimizer_state(parameter, name)
    else:
        moment = _from_partitions(engine, parameter, name)
    return moment.detach().float().clone().view(shape_of(parameter))


def _from_partitions(engine: Engine, parameter: Any, name: str) -> torch.Tensor:
    """At ZeRO-1 and 2, from every rank's flat partition: DeepSpeed's own getter is linked too late for a first step."""
    whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=engine.place.device)
    mapping = parameter._hp_mapping
    if mapping is not None:  # this rank holds a part
        flat = local_masters(engine.deepspeed.optimizer)[mapping.param_group_index]
        here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
        state = engine.deepspeed.basic_optimizer.state[flat][name]
        whole[here.start : here.start + here.numel] = state[there.start : there.start + there.numel]
    return engine.place.sum(whole)


def whole_weight(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy of the weight that the module computes with, in its own dtype."""
    with deepspeed.zero.GatheredParameters([parameter]) if engine.stage == 3 else nullcontext():
        return parameter.data.detach().clone()
