"""The order in which modules use parameters, as ZeRO-3 records it to gather them ahead of their use."""

from typing import Any
from weakref import WeakSet

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

_COORDINATORS: WeakSet[Any] = WeakSet()


def renew_stale_traces(coordinator: Any) -> None:
    """Invalidate the recorded order when a module first reads another module's parameter, as Mamba's mixers read those
    of their convolutions. DeepSpeed 0.19.8 keeps the stale order and raises a "tracing error" in the next pass."""
    _COORDINATORS.add(coordinator)
    parameter_offload.register_external_parameter = _register


def _register(module: Any, parameter: Any) -> None:
    register_external_parameter(module, parameter)
    for coordinator in _COORDINATORS:
        if coordinator.is_complete_trace():
            coordinator._invalidate_trace()
