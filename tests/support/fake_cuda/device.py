"""A CUDA device that is not there, for torch's CPU build: tensors on it are fake, with shapes, dtypes and devices.

`install` has to run before DeepSpeed is imported, in a process of its own, and `hooks.load_hooks` before torch is.
Values do not exist: whatever reads one gets 1 (False of booleans), so branches on values go one way. It shows no race,
no numerics and no choice of kernels.
"""

import os
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any, cast

import numpy as np
import torch
import torch._dynamo  # it wants each function of torch.cuda under one name, so it comes before they are replaced
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from config.errors import UserError
from tests.support.fake_cuda.counts import Counts, Device, answer_without_values

NAME = "NVIDIA H100 80GB HBM3"


def install(counts: Counts, pinned: dict[int, Any]) -> None:
    """Make torch and DeepSpeed see one GPU, and a process group of any size whose collectives do nothing.

    pinned: filled with the storages in pinned memory, by their address, which therefore no other one gets.
    """
    os.environ["DS_ACCELERATOR"] = "cuda"
    _patch_cuda(counts)
    _patch_tensors(counts, pinned)
    answer_without_values(counts)
    _patch_ranks()
    _patch_checks()


class _Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = record

    def query(self) -> bool:
        return False  # a device that is behind: the host would wait where it limits what is queued

    def elapsed_time(self, other: Any) -> float:
        return 1.0

    def synchronize(self) -> None:
        _counts.wait("synchronize")


class _Stream(_Event):
    cuda_stream = 0
    device = torch.device("cuda:0")
    wait_stream = wait_event = _Event.record

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *args: Any) -> None:
        pass


_counts = Counts()


def _patch_cuda(counts: Counts) -> None:
    global _counts
    _counts = counts
    random_state = torch.zeros(16, dtype=torch.uint8)
    properties = types.SimpleNamespace(
        name=NAME, major=9, minor=0, total_memory=80 << 30, multi_processor_count=132, pci_domain_id=0, pci_bus_id=1
    )
    properties.pci_device_id = 0

    def set_rng_state(state: torch.Tensor, *args: Any) -> None:
        assert state.device.type == "cpu", f"a random state on {state.device}"

    nothing: Callable[..., Any] = lambda *args, **kwargs: None  # noqa: E731
    zero: Callable[..., Any] = lambda *args, **kwargs: 0  # noqa: E731
    true: Callable[..., Any] = lambda *args, **kwargs: True  # noqa: E731
    replaced: dict[str, Any] = {
        **dict.fromkeys(("_lazy_init", "set_device", "empty_cache", "manual_seed", "manual_seed_all"), nothing),
        **dict.fromkeys(("reset_peak_memory_stats", "ipc_collect"), nothing),
        **dict.fromkeys(("current_device", "memory_allocated", "max_memory_allocated"), zero),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), zero),
        **dict.fromkeys(("is_available", "is_bf16_supported", "is_initialized"), true),
        "device_count": lambda: 1,
        "memory_stats": lambda *args, **kwargs: defaultdict(int),
        "mem_get_info": lambda *args: (80 << 30, 80 << 30),
        "get_device_capability": lambda *args: (9, 0),
        "get_device_name": lambda *args: NAME,
        "get_device_properties": lambda *args: properties,
        "get_rng_state": lambda *args: random_state.clone(),
        "set_rng_state": set_rng_state,
        "synchronize": lambda *args: counts.wait("synchronize"),
        "Event": _Event,
        "Stream": _Stream,
        "current_stream": lambda *args: _Stream(),
        "default_stream": lambda *args: _Stream(),
        "stream": lambda stream: nullcontext(),
    }
    for name, value in replaced.items():
        setattr(torch.cuda, name, value)
    cast(Any, torch._C)._cuda_getCurrentRawStream = zero  # bitsandbytes, which peft imports, takes it
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, zero)


def _patch_tensors(counts: Counts, pinned: dict[int, Any]) -> None:
    def pin(values: torch.Tensor, *args: Any) -> torch.Tensor:
        storage = values.untyped_storage()
        pinned[storage._cdata] = storage
        return values

    def made(own: Callable[..., Any], from_host: bool) -> Callable[..., Any]:
        def make(*args: Any, pin_memory: bool = False, device: Any = None, **kwargs: Any) -> Any:
            on_device = device is not None and torch.device(device).type == "cuda"
            if from_host and on_device and not isinstance(args[0], torch.Tensor):
                counts.wait("copy")
                return pin(own(*args, **kwargs)).to(device, non_blocking=True)
            values = own(*args, **({} if device is None else {"device": device}), **kwargs)
            return pin(values) if pin_memory else values

        return make

    for name in ("tensor", "as_tensor", "empty", "zeros"):
        setattr(torch, name, made(getattr(torch, name), name in ("tensor", "as_tensor")))
    own_list, own_numpy = torch.Tensor.tolist, torch.Tensor.numpy

    def tolist(values: torch.Tensor) -> Any:
        if not isinstance(values, FakeTensor):
            return own_list(values)
        if values.is_cuda:
            counts.wait("item")
        return np.ones(tuple(values.shape), _numpy_dtype(values)).tolist()

    def numpy(values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(values, FakeTensor):
            return own_numpy(values, *args, **kwargs)
        assert not values.is_cuda, "can't convert a cuda:0 tensor to numpy"
        return np.ones(tuple(values.shape), _numpy_dtype(values))

    def set_data(module: torch.nn.Module, apply: Callable[..., Any], recurse: bool = True) -> torch.nn.Module:
        """`Module._apply`, which makes new parameters of fake tensors; DeepSpeed holds on to the old ones."""
        for child in module.children():
            child._apply(apply)
        for parameter in module._parameters.values():
            if parameter is not None:
                with torch.no_grad():
                    values = apply(parameter)
                if values is not parameter:
                    parameter.data = values
                    if isinstance(values, FakeTensor):
                        parameter.fake_device = values.fake_device  # type: ignore[attr-defined]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else apply(buffer)
        return module

    own_kernel = torch._ops.OpOverload.has_kernel_for_dispatch_key

    def has_kernel(operator: Any, key: Any) -> bool:
        return operator.namespace == "prim" or own_kernel(operator, key)  # a fake tensor's device is an operator

    overload: Any = torch._ops.OpOverload
    overload.has_kernel_for_dispatch_key = has_kernel
    patched: Any = torch.Tensor
    patched.pin_memory, patched.is_pinned = pin, lambda values, *args: values.untyped_storage()._cdata in pinned
    cast(Any, FakeTensor).tolist = tolist
    patched.tolist, patched.numpy, patched.record_stream = tolist, numpy, lambda values, stream: None
    module: Any = torch.nn.Module
    module._apply = set_data


def _numpy_dtype(values: torch.Tensor) -> Any:
    names = {torch.bfloat16: "float32"}
    return names.get(values.dtype, str(values.dtype).removeprefix("torch."))


def _patch_ranks() -> None:
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import partitioned_param_coordinator

    from training import distributed

    accelerator: Any = get_accelerator()
    assert accelerator.device_name() == "cuda"
    accelerator.communication_backend_name = lambda: "fake"
    accelerator.is_triton_supported = lambda: False
    coordinator: Any = partitioned_param_coordinator  # it compares numbers of ranks that are not there
    coordinator.assert_ints_same_as_other_ranks = lambda *args, **kwargs: None
    own: Any = dist.init_process_group
    module: Any = distributed
    module.open_store = lambda **kwargs: FakeStore()
    module.forget_port = lambda: None
    dist.init_process_group = lambda backend, *, rank, world_size, **kwargs: own(
        "fake", store=FakeStore(), rank=rank, world_size=world_size
    )
    world: Any = distributed.World  # objects of other ranks are this one's
    world.gather_objects = lambda self, value: [value] * self.world_size
    world.to_main = lambda self, value: [value] * self.world_size if self.is_main else []
    world.from_main = lambda self, value: value
    world.raise_first = lambda self, problem, error: None  # what values decide

    def all_gather_object(values: list[Any], value: Any, group: Any = None) -> None:
        values[:] = [value] * len(values)

    def broadcast_object_list(*args: Any, **kwargs: Any) -> None:
        pass

    dist.all_gather_object, dist.broadcast_object_list = all_gather_object, broadcast_object_list  # type: ignore[assignment]


def _drawn(
    kind: Any, name: str, *, config: Any, output_loading_info: bool = False, dtype: Any = None, **options: Any
) -> Any:
    """The model of a folder, drawn: tensors in files have values."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = kind._from_config(config, dtype=dtype, attn_implementation=options.get("attn_implementation"))
    nothing = {key: [] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    return (model, nothing) if output_loading_info else model


@contextmanager
def _without_observers() -> Iterator[None]:
    """No dispatch mode but those of the device, without which tensors would be real."""
    with _disable_current_modes() as modes, ExitStack() as stack:
        for mode in reversed(modes):
            if isinstance(mode, (FakeTensorMode, Device)):
                stack.enter_context(mode)
        yield


def _patch_checks() -> None:
    """No check of values refuses a run."""
    from deepspeed.ops.op_builder import CPUAdamBuilder
    from torch.distributed import device_mesh
    from transformers import PreTrainedModel

    from modeling import tensor_parallel
    from precision import activation_signals
    from training.engine import build, kernels, teacher, weights

    own_mesh: Any = device_mesh.init_device_mesh
    own_apart: Any = build.require_documents_apart

    def init_device_mesh(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return own_mesh(*args, **kwargs)

    def apart(*given: Any) -> None:
        with suppress(UserError):
            own_apart(*given)

    exchange: Any = tensor_parallel.Exchange
    own_exchange = exchange.forward

    def evenly(context: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
        even = [len(rows) // group.size] * group.size  # routers' counts have no values
        return own_exchange(context, rows, even, even, group)

    exchange.forward = staticmethod(evenly)
    nothing: Callable[..., Any] = lambda *args: None  # noqa: E731
    update = types.SimpleNamespace(create_adam=nothing, adam_update=nothing, destroy_adam=nothing)
    cast(Any, CPUAdamBuilder).load = lambda self, verbose=True: update  # it reads addresses
    cast(Any, PreTrainedModel).from_pretrained = classmethod(_drawn)
    cast(Any, weights).compare_with_files = lambda engine, folder: set()
    cast(Any, activation_signals)._disable_current_modes = _without_observers
    cast(Any, build).require_documents_apart = cast(Any, teacher).require_documents_apart = apart
    cast(Any, device_mesh).init_device_mesh = init_device_mesh
    cast(Any, kernels).kernel_problem = lambda *args: None  # torch._scaled_mm, tried on values
