"""The state that each optimizer keeps beside the masters: one table from which all else about it follows.

Sharding and resharding, checksums, the precision ledger, the momentum norm, step parity, the plan's and the doctor's
memory and the settings that a load leaves alone follow from a row of it. To add an optimizer:

- its name and its settings: `OptimizerSection` of config/schema.py;
- a row here, and for the planner in launch/plan/step.py;
- `training/engine/optimizers/NAME.py`: `build`, which makes the torch optimizer, `update`, the same in FP64, and
  `after`, which adds the state and bounds of FP32's roundings.

Every state tensor is FP32, has its parameter's shape and starts at zero, so that ZeRO can partition it like the master.
They are created by the first update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from config.schema import OptimizerSection

EXCHANGED_VALUES = 1 << 26
"""[values] Whole matrices that ranks exchange at once, per rank: 256 MiB. ZeRO decides who sends how many."""
COUNT = "step"
"""torch's key for a parameter's number of updates, in every optimizer that counts them."""
AVERAGES = ("exp_avg", "exp_avg_sq")
"""torch's keys of Adam's averages of gradients and of their squares, in every optimizer that keeps them."""


@dataclass(frozen=True)
class OptimizerSpec:
    states: tuple[str, ...]
    """torch's keys of the state tensors; the order in which `update` takes them."""
    momentum: str | None
    """Name of the state tensor that averages gradients, in gradient units; None if there is none."""
    counts_updates: bool
    """Whether it keeps COUNT, for a bias correction."""
    settings: tuple[str, ...]
    """Keys of OptimizerSection read by this optimizer alone, under the same names in torch's parameter groups."""
    defaults: Mapping[str, float] = field(default_factory=dict)
    """Values of settings that are null in the config."""
    matrix_states: tuple[str, ...] | None = None
    """State of hidden matrices (`modeling.parameter_groups`) if they have their own rule. None: same as `states`."""
    by_value: bool = True
    """Whether each value's update depends on its own gradient alone."""
    offload_op: str | None = None
    """Op that DeepSpeed compiles to update masters in host memory in a GPU run; None if torch's own update is used."""

    @property
    def splits_matrices(self) -> bool:
        """Whether hidden matrices have their own rule, and so their own parameter group."""
        return self.matrix_states is not None

    def states_of(self, *, matrix: bool) -> tuple[str, ...]:
        """State tensors of a parameter. matrix: whether it is a hidden matrix."""
        return self.matrix_states if matrix and self.matrix_states is not None else self.states

    def state_bytes(self, *, matrix: bool) -> int:
        """[bytes] Size of the state tensors per value of a parameter."""
        return 4 * len(self.states_of(matrix=matrix))


_ADAM = OptimizerSpec(states=AVERAGES, momentum=AVERAGES[0], counts_updates=True, settings=("betas", "eps"))
OPTIMIZERS: dict[str, OptimizerSpec] = {
    "adamw": replace(_ADAM, offload_op="cpu_adam"),
    "sgd": OptimizerSpec(
        states=("momentum_buffer",),
        momentum="momentum_buffer",
        counts_updates=False,
        settings=("momentum",),
        defaults={"momentum": 0.9},
    ),
    "muon": replace(
        _ADAM,
        by_value=False,
        matrix_states=AVERAGES[:1],
        settings=("momentum", "orthogonalization", "betas", "eps"),
        defaults={"momentum": 0.95},
    ),
    "lion": OptimizerSpec(states=AVERAGES[:1], momentum=AVERAGES[0], counts_updates=False, settings=("betas",)),
    "lamb": replace(_ADAM, by_value=False),
    "stable_adamw": replace(_ADAM, by_value=False),
}
"""optimizer.name to its row."""


def settings_of(section: OptimizerSection) -> dict[str, Any]:
    """The settings that the chosen optimizer reads, with its own defaults filled in."""
    spec = OPTIMIZERS[section.name]
    given = {key: getattr(section, key) for key in spec.settings}
    return {key: spec.defaults[key] if value is None else value for key, value in given.items()}
