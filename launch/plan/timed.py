"""Model where a step's time goes from its operators: FLOPs and bytes at the rates that a device is assumed to reach.

This is modelled, not measured. A kernel takes the time of its FLOPs or of its bytes, whichever is longer, and at least
a few microseconds; the host runs ahead of the device unless launching takes longer.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from config.errors import UserError
from config.optimizers import OPTIMIZERS
from config.rules import check, liger_conflicts
from config.task import CHUNKED_TASKS
from launch.plan.devices import Device
from launch.plan.layout import Layout
from launch.plan.loss import runs_fused
from launch.plan.model import Shape
from launch.plan.operations import Operation, fused
from launch.plan.recompute import recomputed_blocks
from launch.plan.speed import matmul_peak
from modeling.chunked_head import CHUNK_LOGITS, loss_chunk
from modeling.kernels import ARCHITECTURES

SOFTMAX_BYTES = {"operators": 60.0, "kernel": 6.0, "full": 36.0}
"""[bytes] Memory traffic per 16-bit logit of the softmax and its gradient, besides the matmuls: torch's operators on an
FP32 chunk, one kernel, and cross-entropy of all logits at once."""
_NEWTON_SCHULZ = 5
"""Newton-Schulz iterations of Muon."""


@dataclass(frozen=True)
class Timed:
    """Modelled time of a step on one device."""

    micro: dict[str, float]
    """[s] Item to its time per micro-batch."""
    step: dict[str, float]
    """[s] Item to its time per step, for what happens once per step."""
    accumulation: int
    launches: int
    """[operators] Number per micro-batch, including the loss."""
    moved: float
    """[bytes] Read and written by the operators of one micro-batch."""

    @property
    def seconds(self) -> float:
        """[s] Time of the whole step."""
        return sum(self.micro.values()) * self.accumulation + sum(self.step.values())


LIGER, LOSS_KERNEL = "Liger", "loss kernel"
"""Kernels that may be missing on a machine."""


def time_of(
    shape: Shape, layout: Layout, device: Device, *, communication: float, without: Collection[str] = ()
) -> Timed | None:
    """Modelled time of a step; None if its operators could not be counted. communication: [s] time of a step's
    collectives. without: kernels that the machine lacks."""
    own = shape.own
    counted = own.counted
    if counted is None or not counted.operations:
        return None
    operations = kernels_of(counted.operations, layout, "" if LIGER in without else own.architecture)
    rates = _Rates(device, matmul_peak(layout, device))
    again = list(_again(operations, own, layout))
    loss = list(loss_operations(own, layout, fused_softmax=LOSS_KERNEL not in without))
    micro = {
        "block matmuls": rates.seconds(one for one in operations if one.kind == "matmul"),
        "attention": rates.seconds(one for one in operations if one.kind == "attention"),
        "norms, rotary, activations, residual": rates.seconds(one for one in operations if one.kind == "other"),
        "recomputed": sum(share * rates.seconds([one]) for share, one in again),
        "head and loss": rates.seconds(loss),
        "gradients summed in FP32": rates.moving(gradient_bytes(layout) * own.trained_parameters),
    }
    micro = {name: seconds for name, seconds in micro.items() if seconds}
    launches = len(operations) + len(loss) + round(sum(share for share, _ in again))
    computing = sum(micro.values())
    waiting = launches * device.reached.launch - computing
    step = {
        name: rates.moving(each * own.divided / layout.zero_ranks) for name, each in step_bytes(own, layout).items()
    }
    if layout.config.optimizer.name == "muon":
        step["optimizer"] += _newton_schulz(own, layout) / rates.matmul
    compute = computing * layout.accumulation
    if layout.world > 1:
        # with overlap_comm, communication overlaps with the backward pass, two thirds of compute
        hidden = 2 / 3 * compute if layout.overlap else 0.0
        step["communication, exposed"] = max(0.0, communication - hidden)
    if waiting > 0:
        micro["host, exposed"] = waiting
    moved = sum(one.bytes for one in (*operations, *loss)) + sum(share * one.bytes for share, one in again)
    return Timed(micro, step, layout.accumulation, launches, moved)


class _Rates:
    def __init__(self, device: Device, peak: float) -> None:
        reached = device.reached
        self.matmul, self._attention = peak * reached.matmul, peak * reached.attention
        self._bandwidth, self._least = device.bandwidth * reached.bandwidth, reached.kernel

    def moving(self, size: float) -> float:
        """Seconds to read and write this many bytes."""
        return size / self._bandwidth

    def seconds(self, operations: Iterable[Operation]) -> float:
        peaks = {"attention": self._attention}
        return sum(
            max(one.flops / peaks.get(one.kind, self.matmul), self.moving(one.bytes), self._least) for one in operations
        )


def kernels_of(operations: Sequence[Operation], layout: Layout, architecture: str) -> Sequence[Operation]:
    """The operators as executed by the config's kernels: torch's, Liger's or compiled ones. Liger and compiled kernels
    are assumed to be perfect: neighbours become one kernel that reads its inputs once."""
    model = layout.config.model
    if model.compile:
        return fused(operations, lambda one: None if one.scope == "outside" else "block")
    refused = any(liger_conflicts(layout.config)) or layout.offload != "none"
    available = not layout.on_cpu and architecture in ARCHITECTURES and not refused
    if model.kernels == "torch" or not available:
        return operations
    return fused(operations, lambda one: one.scope if one.scope in ("Norm", "attention", "MLP") else None)


def _again(operations: Sequence[Operation], shape: Shape, layout: Layout) -> Iterator[tuple[float, Operation]]:
    """(share of blocks, operator) for the operators of blocks that are recomputed in the backward pass."""
    kind = layout.checkpointing
    share = 1.0 if kind in ("attention", "ops") else recomputed_blocks(shape, layout) / shape.layers
    for one in operations:
        inside = {"attention": one.scope == "attention", "ops": one.kind == "other"}.get(kind, True)
        if share and inside and not one.backward and one.scope != "outside":
            yield share, one


def loss_operations(shape: Shape, layout: Layout, *, fused_softmax: bool) -> Iterator[Operation]:
    """Matmuls of the head and the softmax, forward and backward, chunk by chunk or all at once."""
    if layout.config.task == "classify" or not layout.label_tokens:
        return
    tokens, width = layout.label_tokens, 2 if layout.manifest else layout.width
    model, rows = layout.config.model, shape.vocabulary / shape.head_share
    chunk = loss_chunk(model, tokens=layout.tokens, vocabulary=shape.vocabulary, on_cpu=layout.on_cpu)
    chunked = bool(chunk and shape.plain_head)
    way = "full" if not chunked else "kernel" if fused_softmax and runs_fused(shape, layout) else "operators"
    weight, accumulator = width * rows * shape.hidden, 4.0 * rows * shape.hidden
    for start in range(0, tokens, chunk if chunked else tokens):
        size = min(chunk, tokens - start) if chunked else tokens
        logits, states = width * rows * size, float(width * shape.hidden * size)
        flops = 2.0 * size * rows * shape.hidden
        yield _kernel("matmul", flops, states + weight + logits)
        yield _kernel("other", 0.0, SOFTMAX_BYTES[way] * rows * size)
        yield _kernel("matmul", flops, logits + weight + states)
        if shape.trained_head:
            yield _kernel("matmul", flops, logits + states + (2 * accumulator if chunked else weight))
    if chunked and shape.trained_head:  # zeroed, scaled by the loss gradient, rounded
        yield _kernel("other", 0.0, accumulator + 2 * accumulator + accumulator + weight)


def _kernel(kind: str, flops: float, size: float) -> Operation:
    return Operation(kind, "head", False, flops, {0: size}, {})


def gradient_bytes(layout: Layout) -> float:
    """[bytes] Memory traffic per value for summing a micro-batch's gradients in FP32, from DeepSpeed 0.19.8's code.

    BF16 at ZeRO-1: cast, add to the sum, zero. Else at stages 0 and 1: add to the sum, if there is any. ZeRO-2 and 3:
    copy into the bucket, divide, sum one part; on one rank copy into the bucket, cast and sum.
    """
    if layout.bf16_optimizer:
        return (layout.width + 4) + 12 + layout.width
    if layout.stage == 0 or layout.stage == 1:
        return 12.0 if layout.accumulation > 1 else 0.0
    if layout.zero_ranks == 1:
        return 2.0 * layout.width + (layout.width + 4) + 12
    return (layout.width + 4) + 8 + 12 / layout.zero_ranks


def step_bytes(shape: Shape, layout: Layout) -> dict[str, float]:
    """[bytes] Item to memory traffic of a step per value of a rank's part, from the code of torch and DeepSpeed."""
    matrix = shape.hidden_matrix_parameters / max(shape.trained_parameters, 1)
    rule = OPTIMIZERS[layout.config.optimizer.name]
    state = rule.state_bytes(matrix=True) * matrix + rule.state_bytes(matrix=False) * (1 - matrix)
    in_fp32 = layout.stage == 0 or layout.bf16_optimizer
    # flattened for reduction, divided and copied back, or flattened for the update; then zeroed, twice for BF16
    flattened = 8.0 if layout.stage and not layout.bf16_optimizer else 24.0 if layout.zero_ranks > 1 else 0.0
    items = {
        "optimizer": 8 + state + 4 + state,
        # DeepSpeed's other optimizer wrappers square an FP64 copy
        "norm, checks and clipping": (4 if in_fp32 else 20) + (8 if layout.config.optimizer.gradient_clipping else 0),
        "copies of weights": 4.0 + layout.width if layout.stage else 0.0,
        "copies of gradients": flattened + (8 if layout.bf16_optimizer else 4),
    }
    return {name: size for name, size in items.items() if size}


def _newton_schulz(shape: Shape, layout: Layout) -> float:
    """[FLOP] Cost of Muon's iterations on a rank's share of the matrices."""
    total = 0.0
    for group in shape.groups:
        if group.matrix:
            short, long = group.sides
            each = _NEWTON_SCHULZ * (4.0 * short * short * long + 2.0 * short**3)
            total += each * group.parameters / (short * long)
    return total / layout.zero_ranks


@dataclass(frozen=True)
class Lever:
    """The configured layout with one thing changed."""

    name: str
    layout: Layout
    without: tuple[str, ...] = ()


def levers(shape: Shape, layout: Layout) -> Iterator[Lever]:
    """Changes of the model's settings and kernels that affect a step's time, one at a time."""

    def model(name: str, **settings: Any) -> Iterator[Lever]:
        config = replace(layout.config, model=replace(layout.config.model, **settings))
        with suppress(UserError):
            check(config, str, started=True)
            yield Lever(name, replace(layout, config=config))

    now = layout.config.model
    if now.kernels != "torch":
        yield Lever("without liger-kernel", layout, (LIGER,))
        yield Lever("without the loss's kernel", layout, (LOSS_KERNEL,))
    if not now.compile and layout.stage < 3:
        yield from model("model.compile=true", compile=True)
    if layout.config.task in CHUNKED_TASKS:
        yield from model("model.loss=full", loss="full", loss_chunk_tokens=0)
        few = CHUNK_LOGITS // shape.vocabulary // 64 * 64 or 64
        yield from model(f"model.loss_chunk_tokens={few}", loss="chunked", loss_chunk_tokens=few)
    for kind in ("none", "attention", "full"):
        if kind != layout.checkpointing:
            yield from model(f"model.activation_checkpointing={kind}", activation_checkpointing=kind)
