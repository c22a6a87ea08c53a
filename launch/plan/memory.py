"""Peak memory of one rank, item by item.

Model states are those of Rajbhandari et al. 2020 (ZeRO), with what DeepSpeed 0.19.8 keeps beside them. Activations are
counted as in Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models), tensor by tensor
for the blocks that transformers runs: norms in FP32 step by step, fused attention without its s^2 term, and a softmax
over the vocabulary in FP32, of all tokens or of a chunk (modeling/linear_cross_entropy.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from config.batch import loss_chunk
from launch.plan.layout import BUFFERED_ALLREDUCE, ZERO_DEFAULTS, Layout
from launch.plan.model import Shape
from launch.plan.recompute import attention_bytes, kept_bytes

_GATHER_SIZES = ("stage3_max_live_parameters", "stage3_prefetch_bucket_size")


@dataclass(frozen=True)
class Memory:
    """What one rank needs at its peak."""

    device: dict[str, float]
    """Item to bytes on the accelerator at the peak."""
    host: dict[str, float]
    """Item to bytes in host memory."""
    moment: str
    """The part of the step at which the peak is."""

    @property
    def total(self) -> float:
        """[bytes] On the accelerator."""
        return sum(self.device.values())


def model_states(shape: Shape, layout: Layout) -> tuple[dict[str, float], dict[str, float]]:
    """(on the device, on the host) item to bytes that stay from step to step: ZeRO's table, section 5 and 6.

    Stage 0 updates its FP32 parameters in place. From stage 1 on masters and optimizer state are divided by the ranks,
    from stage 2 on gradients, at stage 3 parameters; also an FP32 run keeps masters beside its parameters then.
    """
    whole, part = float(shape.parameters), shape.parameters / layout.world
    gradients = 4 * (whole if layout.stage < 2 else part)
    kept = _state_bytes(shape, layout)
    if layout.stage == 0:
        items = {"parameters": 4 * whole, "moments": kept, "gradients": gradients}
    else:
        items = {
            "parameters": layout.width * (part if layout.stage == 3 else whole),
            "masters": 4 * part,
            "moments": kept / layout.world,
            "gradients": gradients,
        }
    away = {"masters", "moments", "gradients"} if "optimizer" in layout.offload else set()
    away |= {"parameters"} if "param" in layout.offload.split("+") else set()
    return (
        {name: size for name, size in items.items() if name not in away},
        {name: size for name, size in items.items() if name in away},
    )


def _state_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] The optimizer's state of the whole model."""
    matrices, bytes_of = shape.hidden_matrix_parameters, layout.optimizer.state_bytes
    return float(bytes_of(matrix=True) * matrices + bytes_of(matrix=False) * (shape.parameters - matrices))


def block_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] That autograd keeps of one token in one block when nothing is recomputed.

    By the operations of transformers' blocks: an RMSNorm keeps its FP32 input, the normalised state and its output; a
    projection its input; fused attention queries, keys, values, output and a log-sum-exp; a gated MLP both halves, the
    activation and the product. A dropout mask is one byte a value.
    """
    width, hidden, mlp, queries = layout.width, shape.hidden, shape.intermediate, shape.heads * shape.head_dim
    norm = (4 + 2 * width) * hidden + 4 if shape.rms_norm else 2 * width * hidden + 2 * width
    attention = attention_bytes(shape, layout)
    tensors = 4 if shape.gated else 5 if shape.activation == "gelu_new" else 2
    total = shape.norms * norm + attention + tensors * width * mlp + (2 * hidden if shape.dropout else 0)
    if layout.manifest:  # autocast keeps a 16-bit copy of what enters a projection
        total += 2 * (2 * hidden + queries + mlp)
    return total


def activations(shape: Shape, layout: Layout) -> tuple[float, float, float]:
    """(kept, recomputed, loss) bytes of one micro-batch.

    kept: until the backward pass. recomputed: of one block, made again while its backward pass runs. loss: see
    `loss_bytes`.
    """
    tokens = layout.micro * layout.sequence
    block = block_bytes(shape, layout) * tokens
    if layout.manifest:  # autocast, its cache off, keeps a 16-bit copy of the weights as well
        block += 2 * shape.block_parameters
    final_norm = ((4 + 2 * layout.width) if shape.rms_norm else 2 * layout.width) * shape.hidden * tokens
    kept, again = kept_bytes(shape, layout, block)
    return kept + final_norm, again, loss_bytes(shape, layout)


def loss_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Of logits and what is made of them, at their most.

    All at once: the logits in the dtype they come in, their FP32 log-softmax and its gradients; three FP32 tensors of
    the vocabulary's width at most. In chunks: the FP32 logits of a chunk, which become their gradient, and that in 16
    bits; the gradient of the head's weight, in FP32 and, once summed, in the weight's dtype; that of the hidden states.
    """
    tokens = layout.micro * layout.sequence
    chunk = min(loss_chunk(layout.model, tokens=tokens, vocabulary=shape.vocabulary), tokens)
    if not chunk:
        return 12.0 * shape.vocabulary * tokens
    sixteen = layout.manifest or layout.width == 2
    head = shape.vocabulary * shape.hidden
    of_chunk = (6.0 if sixteen else 4.0) * shape.vocabulary * chunk
    copy = 2.0 * head if layout.manifest else 0.0  # of the weight, for autocast
    rounded = 2.0 * head if layout.width == 2 else 0.0
    return 4.0 * head + max(of_chunk + copy, rounded) + layout.width * shape.hidden * tokens


def peak_memory(shape: Shape, layout: Layout, *, process: float = 0.0) -> Memory:
    """What one rank needs at its peak. process: bytes of the process itself, for ranks on a CPU."""
    device, host = model_states(shape, layout)
    part, tokens = shape.parameters / layout.world, layout.micro * layout.sequence
    kept, recomputed, loss = activations(shape, layout)
    live, arriving = _gathered(shape, layout)
    buffer, copy = _buckets(shape, layout)
    states = {**device, "gathered parameters": live, "process": process}
    begun = layout.accumulation > 1 or layout.stage == 3 or layout.bf16_optimizer
    at_first = {**states, "gradients": states.get("gradients", 0.0) if begun else 0.0}
    working = recomputed + tokens * layout.width * (2 * shape.intermediate + 2 * shape.hidden)
    in_flight = layout.width * max(shape.block_parameters, shape.largest_parameter)
    before = 0.0 if layout.on_cpu else buffer  # where nothing is written into it yet, it takes no memory on a CPU
    # Gradients are reduced when they fill a bucket; by then the activations of the blocks they come from are freed.
    left = 1 - min(1.0, layout.size("reduce_bucket_size", shape.parameters) / shape.parameters)
    whole = {"gradients in flight": layout.width * float(shape.parameters)} if layout.bf16_optimizer else {}
    moments = {
        "the loss": at_first | {"activations": kept, "logits": loss, "buckets": buffer if layout.stage == 3 else 0.0},
        "the backward pass": at_first
        | {
            "activations": kept + working,
            "buckets": before,
            "gradients in flight": in_flight,
            "gathered parameters": live + arriving,
        },
        "the reduction of gradients": states
        | {
            "activations": left * kept + working,
            "buckets": buffer + copy,
            "gathered parameters": live + left * arriving,
        }
        | whole,
        "the optimizer step": states | {"gathered parameters": 0.0, "step": _step_copy(layout, part)},
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    items = {name: size for name, size in moments[moment].items() if size}
    if layout.background_save:
        computing = layout.width * (part if layout.stage == 3 else shape.parameters)
        saved = 4 * part + _state_bytes(shape, layout) / layout.world + computing
        if not layout.on_cpu:
            host["checkpoint copy"] = saved
        elif layout.saves_between:
            items["checkpoint copy"] = saved
    return Memory(items, host, moment)


def _gathered(shape: Shape, layout: Layout) -> tuple[float, float]:
    """(gathered, arriving) bytes of whole parameters at stage 3: those in use, and the next bucket in one piece."""
    if layout.stage < 3:
        return 0.0, 0.0
    sizes = (float(layout.zero.get(key, ZERO_DEFAULTS[key])) for key in _GATHER_SIZES)
    live, arriving = (layout.width * min(shape.parameters, size) for size in sizes)
    return live, arriving


def _buckets(shape: Shape, layout: Layout) -> tuple[float, float]:
    """(buffer, copies) bytes through which gradients go to the network."""
    if layout.stage == 0 or layout.bf16_optimizer:
        flat = layout.reduced * min(shape.parameters, BUFFERED_ALLREDUCE) if layout.world > 1 else 0.0
        return 0.0, float(flat)
    bucket = layout.size("reduce_bucket_size", shape.parameters)
    filled = min(max(bucket, shape.largest_parameter), shape.parameters)  # a tensor larger than the bucket goes alone
    buffers = 2 if layout.overlap and layout.stage < 3 else 1
    copies = filled * (1 + 1 / layout.world) if layout.stage == 3 else filled  # in one piece, and what is scattered
    return layout.reduced * bucket * buffers, layout.reduced * float(copies)


def _step_copy(layout: Layout, part: float) -> float:
    """[bytes] FP32 gradients that the optimizer step flattens into a second copy."""
    if layout.stage == 0 or layout.bf16_optimizer or "optimizer" in layout.offload:
        return 0.0
    if layout.stage == 3:
        return 4 * min(part, float(layout.zero.get("sub_group_size", ZERO_DEFAULTS["sub_group_size"])))
    return 0.0 if layout.stage == 2 and layout.width == 2 else 4 * part
