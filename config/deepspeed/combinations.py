"""The combinations of precision, ZeRO and offload that train as FP32 does, and those refused or repaired, and why.

One table: the config refuses according to it, the precision matrix (`python -m lab.matrix`) measures each of its rows,
and docs/precision-matrix.md is generated from both. A combination without cells in the matrix is refused as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from config.errors import UserError

COMPUTES = {"cast": ("fp32", "bf16", "fp16"), "manifest": ("bf16", "fp16", "mixed", "fp8", "fp8_bf16")}
"""Path to its dtypes. mixed: a manifest with BF16 and FP16; fp8: FP8 with FP32 around it; fp8_bf16: with BF16."""
FP8 = ("fp8", "fp8_bf16")
"""Also compared with plain torch that computes the same FP8 products."""
OFFLOADS = {
    0: ("none",),
    1: ("none", "optimizer"),
    2: ("none", "optimizer"),
    3: ("none", "optimizer", "param", "optimizer+param"),
}
"""ZeRO stage to what it can offload to host memory."""
STAGES = tuple(OFFLOADS)
_SHARDED = (1, 2, 3)


class Combination(NamedTuple):
    """A combination of everything that decides, besides the settings, whether a run's numerics are right."""

    path: str
    """cast or manifest."""
    compute: str
    """One of COMPUTES."""
    stage: int
    offload: str = "none"
    """none, optimizer, param or optimizer+param."""

    def __str__(self) -> str:
        offload = "" if self.offload == "none" else f", {self.offload} on the CPU"
        manifest = "" if self.path == "cast" else " manifest"
        compute = self.compute.upper().replace("_", " in ")
        return f"{compute}{manifest}, ZeRO-{self.stage}{offload}"


@dataclass(frozen=True)
class Upstream:
    """A case that DeepSpeed 0.19.8 computes wrongly, and what Mantissa does about it."""

    path: str
    computes: tuple[str, ...]
    stages: tuple[int, ...]
    problem: str
    instead: str = ""
    """The advice for a refused combination. Empty: Mantissa works around the problem."""
    clipping: bool | None = None
    """True: only when every step is clipped; False: only when none is; None: both."""

    @property
    def refused(self) -> bool:
        """Whether the config refuses it; otherwise the engine works around it."""
        return bool(self.instead)

    def covers(self, combination: Combination, *, clipping: bool | None = None) -> bool:
        """Whether the combination has the problem. clipping: None asks about either case."""
        return (
            combination.path == self.path
            and combination.compute in self.computes
            and combination.stage in self.stages
            and (clipping is None or self.clipping in (None, clipping))
        )


UPSTREAM = (
    Upstream(
        "cast",
        ("fp16",),
        (0,),
        "DeepSpeed 0.19.8 never scales the loss there but divides the gradients by the scale, so eps dominates updates"
        " (measured: loss 5.778 after 12 steps where FP32 has 4.111)",
        "use ZeRO-1: ds_configs/zero1_fp16.json",
    ),
    Upstream(
        "cast",
        ("bf16",),
        (0,),
        "DeepSpeed 0.19.8 steps Adam once while it starts, so the first updates are too small (measured: loss 4.7544"
        " after a step where FP32 has 4.7236 and ZeRO-1 4.7254), and it sums micro-batches in BF16 (a mean gradient of"
        " 0.5, not 1.0)",
        "use ZeRO-1: ds_configs/zero1_bf16.json",
    ),
    Upstream(
        "manifest",
        ("fp16", "mixed"),
        (0,),
        "FP16 regions need a loss scale, which DeepSpeed does not apply without ZeRO",
        "use ZeRO-1: ds_configs/zero1_fp32.json",
    ),
    Upstream(
        "cast",
        ("fp32",),
        (0,),
        "DeepSpeed 0.19.8 reports no gradient norm there, and applies gradients that are not finite",
    ),
    Upstream(
        "cast",
        ("fp16",),
        (1, 2),
        "on a step where the loss scale grows DeepSpeed 0.19.8 divides the gradients by the new scale, so an update"
        " that is not clipped sees half its gradient",
        clipping=False,
    ),
    Upstream(
        "cast",
        ("fp16",),
        (3,),
        "on a step where the loss scale grows DeepSpeed 0.19.8 divides the gradients by the new scale: an update that"
        " is not clipped sees half its gradient, and half the gradient norm is reported",
    ),
)


@dataclass(frozen=True)
class Setting:
    """A non-default value of a setting: measured by matrix cells of its own, or refused."""

    key: str
    """Dotted key of the DeepSpeed JSON, or of the run config."""
    base: Any
    """The value in the rest of the matrix, and of a missing key."""
    other: Any
    """The value that is measured or refused; None: every value but `base` is refused."""
    stages: tuple[int, ...] = _SHARDED
    """ZeRO stages where it applies; it has no effect at others, unless another row covers them."""
    computes: tuple[str, ...] = ("fp32", "bf16", "fp16", "mixed")
    """Dtypes that are measured: mixed on the manifest path, the others on the cast path."""
    in_json: bool = True
    """Whether it is a key of the DeepSpeed JSON rather than of the run config."""
    refused: str = ""
    """Why it is refused. Empty: it is measured and agrees with FP32."""

    @property
    def combinations(self) -> tuple[Combination, ...]:
        """The combinations at which it is measured."""
        if self.refused:
            return ()
        paths = {compute: "manifest" if compute == "mixed" else "cast" for compute in self.computes}
        found = (Combination(path, compute, stage) for compute, path in paths.items() for stage in self.stages)
        return tuple(combination for combination in found if refusal(combination) is None)

    def refuses(self, value: Any, stage: int) -> bool:
        """Whether this row refuses a value of the JSON."""
        if not self.refused or stage not in self.stages or value in (self.base, "auto"):
            return False
        return self.other is None or value == self.other

    def __str__(self) -> str:
        return f"{self.key} not {scalar(self.base)}" if self.other is None else f"{self.key} = {scalar(self.other)}"


_ZERO = "zero_optimization."
_SIXTEEN = ("bf16", "fp16")
_SCALED = ("fp16", "mixed")
_NO_NVME = "the precision matrix has no measurements with NVMe offload; use cpu"
_WRONG_MASTERS = (
    "DeepSpeed 0.19.8 then reads masters back from the wrong places: before the first step safe_get_full_fp32_param"
    " gives other values than the weights (measured: off by up to 0.487; loss and gradient norm are right), and"
    " telemetry reads them so; remove it"
)
_ASSERTS = "DeepSpeed 0.19.8 stops there with an AssertionError while zero_optimization.reduce_scatter is on; remove it"

SETTINGS = (
    Setting("precision.reduce", "fp32", "compute", computes=_SIXTEEN, in_json=False),
    Setting("precision.masters", "fp32", "split", computes=("bf16",), in_json=False),
    Setting("precision.loss_scale.policy", "deepspeed", "adaptive", computes=_SCALED, in_json=False),
    Setting("precision.loss_scale.policy", "deepspeed", "static", computes=_SCALED, in_json=False),
    Setting("model.activation_checkpointing", "none", "selective", stages=STAGES, in_json=False),
    Setting("model.activation_checkpointing", "none", "attention", stages=STAGES, in_json=False),
    Setting("model.activation_checkpointing", "none", "ops", stages=STAGES, in_json=False),
    Setting("model.loss", "auto", "chunked", stages=STAGES, in_json=False),
    Setting("model.balance_loss", 0.0, 0.2, stages=STAGES, computes=("fp32", "bf16", "fp16"), in_json=False),
    Setting("parallel.sequence", 1, 2, stages=STAGES, in_json=False),
    Setting("parallel.tensor", 1, 2, stages=STAGES, computes=("fp32", "bf16", "fp16"), in_json=False),
    Setting("parallel.expert", 1, 2, stages=(1, 2, 3), computes=("fp32", "bf16", "fp16"), in_json=False),
    Setting(_ZERO + "overlap_comm", False, True),
    Setting(_ZERO + "reduce_scatter", True, False),
    Setting(_ZERO + "contiguous_gradients", True, False),
    Setting(_ZERO + "use_multi_rank_bucket_allreduce", True, False, stages=(1, 2)),
    Setting(_ZERO + "allgather_partitions", True, False, stages=(1, 2)),
    Setting(_ZERO + "parameter_alignment", False, True, stages=(1, 2)),
    Setting(_ZERO + "stage3_use_all_reduce_for_fetch_params", False, True, stages=(3,)),
    Setting(_ZERO + "stage3_allgather_sequential", False, True, stages=(3,)),
    Setting(_ZERO + "memory_efficient_linear", True, False, stages=(3,)),
    Setting(_ZERO + "zero_hpz_partition_size", 1, 2, stages=(3,)),
    Setting("bf16.immediate_grad_update", False, True, computes=("bf16",)),
    Setting("prescale_gradients", False, True, stages=(0, 1)),
    Setting("gradient_predivide_factor", 1.0, 2.0, stages=(0, 1)),
    Setting("prescale_gradients", False, True, stages=(2, 3), refused=_ASSERTS),
    Setting("gradient_predivide_factor", 1.0, None, stages=(2, 3), refused=_ASSERTS),
    Setting(_ZERO + "round_robin_gradients", False, True, stages=(1, 2), refused=_WRONG_MASTERS),
    Setting(_ZERO + "offload_optimizer.device", "none", "nvme", refused=_NO_NVME),
    Setting(_ZERO + "offload_param.device", "none", "nvme", refused=_NO_NVME),
    Setting(
        _ZERO + "offload_optimizer.ratio",
        1.0,
        None,
        refused="it splits the optimizer between the device and DeepSpeedCPUAdam, which the precision matrix does not"
        " measure; remove it",
    ),
    Setting(
        _ZERO + "offload_optimizer.super_offload",
        False,
        True,
        refused="it changes the optimizer step, on machines without measurements in the precision matrix; remove it",
    ),
    Setting(
        _ZERO + "stage3_module_granularity_threshold",
        0,
        None,
        stages=(3,),
        refused="the precision matrix could not measure it: on a CPU DeepSpeed 0.19.8 stops in zero_grad with 'unknown"
        " parameter type'; remove it",
    ),
)
"""Settings that affect the numbers. Sizes, prefetching and logging are not among them; see lab/matrix/cells.py."""


def combinations() -> Iterator[Combination]:
    """Every combination that the precision matrix has cells for."""
    for path, computes in COMPUTES.items():
        for compute in computes:
            for stage, offloads in OFFLOADS.items():
                for offload in offloads:
                    yield Combination(path, compute, stage, offload)


def refusal(combination: Combination) -> Upstream | None:
    """The row of the table that refuses the combination."""
    return next((row for row in UPSTREAM if row.refused and row.covers(combination)), None)


def refuse_combination(where: str, combination: Combination) -> None:
    """Raises UserError for a combination that is known to be wrong, or not measured. where: file or key to name."""
    row = refusal(combination)
    if row is not None:
        manifest = " regions" if combination.path == "manifest" else ""
        stage = f"{combination.compute.upper()}{manifest} with ZeRO-{combination.stage}"
        raise UserError(f"{where}: {stage} is refused: {row.problem}; {row.instead}")
    if combination not in set(combinations()):
        raise UserError(
            f"{where}: {combination} is refused: docs/precision-matrix.md has no row for it; use one of its"
        )


def refuse_settings(where: str, values: dict[str, Any], stage: int) -> None:
    """Raises UserError for a setting of a JSON that the matrix does not verify. values: by dotted key."""
    for row in SETTINGS:
        if row.in_json and row.key in values and row.refuses(values[row.key], stage):
            setting = f"{row.key} = {scalar(values[row.key])}"
            raise UserError(f"{where}: {setting} is refused at ZeRO-{stage}: {row.refused}")


def scalar(value: Any) -> str:
    """A scalar as written in YAML and JSON."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
