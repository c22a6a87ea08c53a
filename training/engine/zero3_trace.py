"""ZeRO-3's record of the order in which modules use parameters, by which it gathers them ahead."""

from typing import Any
from weakref import WeakSet

from deepspeed.runtime.zero import parameter_offload
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

_COORDINATORS: WeakSet[Any] = WeakSet()


def renew_stale_traces(coordinator: Any) -> None:
    """Record anew once a module is seen to read a parameter of another one, as Mamba's mixers do of other ones in
    evaluation than in training. DeepSpeed 0.19.8 ends the next pass with a "tracing error" instead."""
    _COORDINATORS.add(coordinator)
    parameter_offload.register_external_parameter = _register


def _register(module: Any, parameter: Any) -> None:
    register_external_parameter(module, parameter)
    for coordinator in _COORDINATORS:
        if coordinator.is_complete_trace():
            coordinator._invalidate_trace()
