"""Peak memory of one rank, item by item.

Model states follow Rajbhandari et al. 2020 (ZeRO), plus what DeepSpeed 0.19.8 keeps in addition. Activations are
counted in a forward pass of the model (counted.py).
"""

from dataclasses import dataclass, replace

from config.optimizers import OPTIMIZERS
from launch.plan.gathered import gathered
from launch.plan.layout import BUFFERED_ALLREDUCE, Layout
from launch.plan.loss import loss_bytes, sampler_bytes, sampling_moments, teacher_bytes
from launch.plan.model import Shape
from launch.plan.recompute import kept_bytes
from launch.plan.step import step_bytes
from precision.split_masters import SPLIT_BYTES


@dataclass(frozen=True)
class Memory:
    device: dict[str, float]
    """Item to bytes on the accelerator at the peak."""
    host: dict[str, float]
    """Item to bytes in host memory."""
    moment: str
    """Part of the step in which the peak occurs."""

    @property
    def total(self) -> float:
        """[bytes] Total on the accelerator."""
        return sum(self.device.values())


def model_states(shape: Shape, layout: Layout) -> tuple[dict[str, float], dict[str, float]]:
    """(device, host) item to bytes that persist from step to step, as in sections 5 and 6 of the ZeRO paper.

    Stage 0 updates its FP32 parameters in place. Masters and optimizer state are partitioned from stage 1 on, gradients
    from stage 2 on, parameters at stage 3; from stage 1 on even an FP32 run keeps separate masters. Split masters
    consist of the parameters plus the bytes given here. Frozen parameters have no masters, state or gradients.
    """
    part = shape.divided / layout.zero_ranks
    gradients = 4 * (float(shape.trained_parameters) if layout.stage < 2 else part)
    kept = _state_bytes(shape, layout)
    if layout.stage == 0:
        items = {"parameters": shape.weight_bytes(4), "moments": kept, "gradients": gradients}
    else:
        items = {
            "parameters": shape.weight_bytes(layout.width, ranks=layout.zero_ranks if layout.stage == 3 else 1),
            "masters": (SPLIT_BYTES if layout.config.precision.masters == "split" else 4) * part,
            "moments": kept / layout.zero_ranks,
            "gradients": gradients,
        }
    away = {"parameters"} if "param" in layout.offload.split("+") else set()
    host = {}
    if "optimizer" in layout.offload:
        # ZeRO-1 sums gradients on the device and sends a rank's part to the update, as ZeRO-2 does
        away |= {"masters", "moments"} | ({"gradients"} if layout.stage > 1 else set())
        host = {"gradients": 4 * part} | ({"updated parameters": layout.width * part} if layout.stage < 3 else {})
    return (
        {name: size for name, size in items.items() if name not in away},
        {name: size for name, size in items.items() if name in away} | host,
    )


def _state_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Optimizer state of the whole model."""
    bytes_of = OPTIMIZERS[layout.config.optimizer.name].state_bytes
    return float(sum(bytes_of(matrix=group.matrix) * group.parameters for group in shape.groups))


def activations(shape: Shape, layout: Layout) -> tuple[float, float, float]:
    """(kept, recomputed, loss) bytes of one micro-batch. kept: until the backward pass. recomputed: by one block during
    its backward pass. loss: see `loss_bytes`."""
    assert shape.counted is not None
    kept, again = kept_bytes(shape, layout)
    return kept + shape.counted.outside * layout.tokens, again, loss_bytes(shape, layout)


def peak_memory(shape: Shape, layout: Layout, *, process: float = 0.0) -> Memory:
    """Peak memory of one rank. process: bytes used by the process itself, for ranks on a CPU."""
    whole_shape, shape = shape, shape.own
    device, host = model_states(shape, layout)
    trained = shape.trained_parameters
    kept, recomputed, loss = activations(shape, layout)
    whole_now = gathered(shape, layout)
    buffer, copy = _buckets(shape, layout)
    # hpZ's copy of the parameters (Wang et al. 2023, ZeRO++, section 3.2), partitioned among the ranks of a node:
    # created when a parameter is released, and freed after the update
    second = layout.width * float(shape.parameters) / layout.secondary if layout.secondary > 1 else 0.0
    if "param" in layout.offload.split("+"):
        host, second = host | ({"second copy": second} if second else {}), 0.0
    beside = {"teacher": teacher_bytes(shape, layout), "sampler": sampler_bytes(shape, layout)}
    states = {**device, **beside, "process": process}
    states["gathered parameters"] = whole_now.loss
    states["second copy"] = second * max(0.0, 1 - whole_now.loss / (layout.width * shape.parameters))
    begun = layout.accumulation > 1 or layout.stage == 3 or layout.bf16_optimizer
    at_first = {**states, "gradients": states.get("gradients", 0.0) if begun else 0.0}
    forward = layout.block_tokens * layout.width * (2 * shape.intermediate + 2 * shape.hidden)
    working = recomputed + forward
    in_flight = layout.width * max(shape.trained_block, shape.largest_trained)
    # a quantised layer has its dequantised weights while it computes
    rebuilt = {"rebuilt weights": layout.width * float(shape.codes.largest)} if shape.codes is not None else {}
    before = 0.0 if layout.on_cpu else buffer  # not written yet, so it takes no memory on a CPU
    # Gradients are reduced when they fill a bucket; by then the activations of their blocks have been freed.
    # BF16_Optimizer reduces all of them after the last backward pass, and zeroes those of a micro-batch for the next
    # one, which keeps their memory allocated.
    left = 1 - min(1.0, layout.size("reduce_bucket_size", trained) / trained)
    whole = {"gradients in flight": layout.width * float(trained)} if layout.bf16_optimizer else {}
    earlier = whole if layout.accumulation > 1 else {}
    step = step_bytes(shape, layout)
    if "optimizer" in layout.offload:
        host, step = {**host, "step": step}, 0.0
    # Ranks on a CPU build the whole model, even with tensor parallelism. A model in 4 or 8 bits is loaded whole on its
    # device and then partitioned.
    starts_whole = shape.codes is not None or (layout.on_cpu and (layout.stage < 3 or layout.tensor > 1))
    moments = {name: at_first | added for name, added in sampling_moments(shape, layout).items()}
    if layout.stage == 3:
        begins = {"activations": forward, "buckets": buffer, "gathered parameters": whole_now.first}
        on_the_way = {"activations": kept + forward, "buckets": buffer, "gathered parameters": whole_now.forward}
        moments |= {"the first layers": at_first | begins, "the forward pass": at_first | on_the_way}
    # ZeRO-1 makes its buffer in a step's first backward pass, and frees it after the last one
    kept_buffer = buffer if layout.stage == 3 else before if layout.stage == 1 and layout.accumulation > 1 else 0.0
    scored = {"activations": kept, "logits": loss, "buckets": kept_buffer}
    backward = {"activations": kept + working, "buckets": before, "gradients in flight": in_flight}
    backward |= {"gathered parameters": whole_now.backward, **rebuilt}
    reduced = {"activations": 0.0 if layout.bf16_optimizer else left * kept + working, "buckets": buffer + copy}
    reduced["gathered parameters"] = whole_now.staying + left * (whole_now.backward - whole_now.staying)
    moments |= {
        "the loss": at_first | scored | earlier,
        "the backward pass": at_first | backward | earlier,
        "the reduction of gradients": states | reduced | whole,
    }
    if starts_whole:
        moments["the start"] = _start(whole_shape, layout, device, process)
    updated = {"gathered parameters": whole_now.step, "second copy": second, "step": step}
    moments["the optimizer step"] = states | updated | whole
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    items = {name: size for name, size in moments[moment].items() if size}
    background = layout.config.checkpoint.background
    if background == "always" or (background == "auto" and layout.offload == "none"):  # from a host copy
        saved = saved_bytes(shape, layout)
        if not layout.on_cpu:
            host["checkpoint copy"] = saved
        elif layout.config.checkpoint.every_steps > 0:
            items["checkpoint copy"] = saved
    return Memory(items, host, moment)


def saved_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] One rank's part of a checkpoint: masters, optimizer state, and weights in the compute dtype. Frozen
    weights are not saved. Below stage 3 every rank copies the weights but only rank 0 writes them."""
    shape = shape.own
    trained = shape.trained_parameters / (layout.zero_ranks if layout.stage == 3 else 1)
    share = layout.zero_ranks if layout.stage else 1
    masters = 4 * shape.divided / share if layout.stage else 0.0
    return masters + _state_bytes(shape, layout) / share + layout.width * trained


def checkpoint_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of a checkpoint on disk; what every tensor-parallel rank holds in full counts once per rank."""
    if layout.tensor > 1:
        return layout.tensor * checkpoint_bytes(shape.own, replace(layout, tensor=1))
    masters = 4 * shape.trained_parameters if layout.stage else 0
    # with expert parallelism the weights file has the experts of rank 0 only
    return masters + _state_bytes(shape, layout) + layout.width * shape.own.trained_parameters


def _start(shape: Shape, layout: Layout, device: dict[str, float], process: float) -> dict[str, float]:
    """Item to bytes at the start, when the model is built in FP32 in host memory, then sliced and rounded."""
    codes = shape.codes
    whole = float(shape.parameters if codes is None else shape.parameters - codes.parameters)
    masters = 4 * shape.own.divided / layout.zero_ranks if "masters" in device else 0.0  # not partitioned before
    return {
        "parameters": shape.own.weight_bytes(layout.width),
        "masters": masters,
        "loading": 4 * whole,
        "process": process,
    }


def _copied(shape: Shape, layout: Layout, *, experts: bool) -> float:
    """[bytes] Size of the copies for the largest bucket of FP32 gradients that BF16_Optimizer flattens. The gradients
    of a group are one tensor; a bucket with a single tensor is reduced in place, or cast."""
    buckets: list[list[float]] = [[]]
    for group in shape.groups:
        if (group.shared > 1) == experts:
            buckets[-1].append(group.parameters / group.shared)
            if sum(buckets[-1]) > BUFFERED_ALLREDUCE:
                buckets.append([])
    cast = layout.reduced if layout.reduced < 4 else 0
    return max(sum(bucket) * (cast + (4 if len(bucket) > 1 else 0)) for bucket in buckets)


def _buckets(shape: Shape, layout: Layout) -> tuple[float, float]:
    """(buffer, copies) bytes used to send gradients over the network."""
    if layout.stage == 0 or layout.bf16_optimizer:
        if layout.zero_ranks == 1:
            return 0.0, 0.0
        if layout.stage == 0:
            return 0.0, layout.reduced * float(min(shape.trained_parameters, BUFFERED_ALLREDUCE))
        # shared experts are reduced after everything else
        return 0.0, max(_copied(shape, layout, experts=experts) for experts in (False, True))
    trained = shape.trained_parameters
    bucket = layout.size("reduce_bucket_size", trained)
    filled = min(max(bucket, shape.largest_trained), trained)  # a tensor larger than the bucket is sent alone
    buffers = 2 if layout.overlap and layout.stage < 3 else 1
    copies = filled * (1 + 1 / layout.zero_ranks if layout.stage == 3 else 1)  # the flat copy, and the scattered part
    return layout.reduced * bucket * buffers, layout.reduced * float(copies)
