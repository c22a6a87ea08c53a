"""A copy of a nested state in host memory, so that the state can change while the copy is being written."""

from __future__ import annotations

import copy
from typing import Any

import torch

from training.checkpoint.inventory import leaves


def host_copy(state: Any) -> Any:
    """`state` with every tensor in host memory of its own. Tensors that share memory still do, as torch.save keeps it.

    state: nested dictionaries, lists and tuples. Tensors inside other objects are copied on their own device. The copy
    has `state`'s classes throughout, and torch.save writes the same bytes for it.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    memo: dict[int, Any] = {id(tensor): _on_host(tensor, storages) for _, tensor in leaves(state)}
    copied = copy.deepcopy(state, memo)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return copied


def _on_host(tensor: torch.Tensor, storages: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    source = tensor.detach().untyped_storage()
    which = source._cdata  # by which torch.save knows one storage from another, empty ones too
    if which not in storages:
        # pinned memory is what a device can be copied to while others compute; torch keeps it for the next save
        pinned = tensor.device.type != "cpu"
        target = torch.empty(source.nbytes(), dtype=torch.uint8, pin_memory=pinned).untyped_storage()
        target.copy_(source, non_blocking=pinned)
        storages[which] = target
    view = torch.empty(0, dtype=tensor.dtype)
    view.set_(storages[which], tensor.storage_offset(), tensor.size(), tensor.stride())
    view.__dict__.update(tensor.__dict__)  # such as the ds_id that ZeRO-3 gives its flat groups
    return view.requires_grad_(tensor.requires_grad)
