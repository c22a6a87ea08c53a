"""Duration of a step on any number of ranks: matmuls at an assumed share of the peak, and bytes over the links.

A ring sends (n - 1) / n of a tensor through every rank for a reduce-scatter or all-gather, and twice that for an
all-reduce (Thakur et al. 2005). Within a node it runs at the speed of a link; across nodes at that of a link or of all
network adapters of a node together, whichever is slower. Each collective adds log2(n) latencies, as trees do.
"""

import math
from dataclasses import dataclass, replace

from config.optimizers import OPTIMIZERS
from launch.plan.devices import DEFAULT_MFU, LATENCY_SECONDS, Device
from launch.plan.gathered import bytes_gathered
from launch.plan.layout import BUFFERED_ALLREDUCE, Layout
from launch.plan.model import Shape
from launch.plan.recompute import recomputed_blocks, recomputed_share
from modeling.chunked_head import loss_chunk


@dataclass(frozen=True)
class Traffic:
    """Bytes that leave one rank in one optimizer step, including a ring's factor (n - 1) / n."""

    gradients: float
    """[bytes] Gradients in the ring of all ranks with the same matrix slices."""
    parameters: float
    """[bytes] Parameters gathered in the same ring, and the exchange of an optimizer that needs whole matrices."""
    collectives: float
    """[collectives] Number per step."""
    second_copy: float = 0.0
    """[bytes] Parameters gathered from the copy that zero_hpz_partition_size ranks share."""
    sequences: float = 0.0
    """[bytes] All-to-all exchanges of sequence parallelism."""
    trades: float = 0.0
    """[collectives] Number of these per step."""
    sums: float = 0.0
    """[bytes] Reductions and gathers of tensor parallelism."""
    reductions: float = 0.0
    """[collectives] Number of these per step."""
    tokens: float = 0.0
    """[bytes] Tokens that expert parallelism sends to other ranks and returns to them, if all experts are used alike.
    With unbalanced experts this is still the mean over ranks, except for the share of tokens whose experts are on
    their own rank."""
    tokens_at_most: float = 0.0
    """[bytes] The same for the busiest rank, if routers send it all tokens of the others and none of its own."""
    dispatches: float = 0.0
    """[collectives] Number of these per step."""
    of_experts: float = 0.0
    """[bytes] Gradients and parameters of shared experts, in the ring of the ranks that hold the same ones."""

    @property
    def sent(self) -> float:
        """[bytes] Total of all kinds."""
        states = self.gradients + self.parameters + self.second_copy + self.of_experts
        return states + self.sequences + self.sums + self.tokens


def traffic(shape: Shape, layout: Layout) -> Traffic:
    """Traffic of one optimizer step: gradients and parameters, and sequence, tensor or expert parallelism.

    Jacobs et al. 2023, section 3.2: queries, keys, values and the attention output of each block cross the network in
    the forward pass, their gradients in the backward pass. Shoeybi et al. 2019, section 3: outputs of row-parallel
    layers are all-reduced, and in the backward pass the gradients of the inputs of column-parallel layers; DeepSpeed
    0.19.8 reduces those of queries, keys and values one by one. A split head's logits are gathered, unless the loss is
    chunked.
    """
    shape = shape.own
    found = _of_states(shape, layout)
    if layout.tensor > 1:
        return _with_sums(found, shape, layout)
    if layout.expert > 1:
        return _with_tokens(found, shape, layout)
    if layout.sharing == 1:
        return found
    queries, keys = shape.widths(layout.sharing)
    again = layout.checkpointing in ("attention", "ops")
    times = layout.accumulation * (2 * shape.layers + (shape.layers if again else recomputed_blocks(shape, layout)))
    sent = times * layout.width * layout.tokens * (2.0 * queries + 2.0 * keys)
    return replace(found, sequences=_leaving(layout.sharing) * sent, trades=4.0 * times)


def _leaving(ranks: int) -> float:
    """[fraction] Share of a tensor that leaves each of `ranks` ranks in a ring all-gather or reduce-scatter."""
    return (ranks - 1) / ranks


def _with_sums(found: Traffic, shape: Shape, layout: Layout) -> Traffic:
    """Add the all-reduces (twice around the ring) and gathers (once) of tensor parallelism."""
    # Non-reentrant recomputation stops at the last tensor needed, before the block's last all-reduce.
    each = shape.rows if layout.config.model.checkpointing_reentrant else shape.rows - 1
    again = recomputed_blocks(shape, layout) * float(each)
    cut_head = shape.head_share > 1
    outputs, inputs = shape.layers * shape.rows + again, shape.layers * shape.columns + cut_head
    reductions = outputs + inputs
    # Under a manifest, layer outputs are in 16 bits; the residual stream, hence gradients of inputs, is FP32.
    output_width = 2 if layout.manifest else layout.width
    sent = 2 * layout.tokens * float(shape.hidden) * (outputs * output_width + inputs * layout.width)
    model, on_cpu = layout.config.model, layout.on_cpu
    chunk = loss_chunk(model, tokens=layout.tokens, vocabulary=shape.vocabulary, on_cpu=on_cpu)
    if cut_head and chunk:  # the maximum and two sums per token, in FP32
        sent, reductions = sent + 2 * 12.0 * layout.tokens, reductions + 2 * math.ceil(layout.tokens / chunk)
    elif cut_head:
        sent, reductions = sent + output_width * layout.tokens * float(shape.vocabulary), reductions + 1
    sent = _leaving(layout.tensor) * layout.accumulation * sent
    return replace(found, sums=sent, reductions=layout.accumulation * reductions)


def _with_tokens(found: Traffic, shape: Shape, layout: Layout) -> Traffic:
    """Add the tokens that ranks send to each other's experts and get back, forward and backward, and again if a block
    is recomputed (non-reentrant only). Before each forward pass of a layer, ranks exchange token counts per expert."""
    ranks, chosen = layout.expert, shape.experts_per_token
    again = min(recomputed_blocks(shape, layout), shape.expert_layers)
    forward = shape.expert_layers * (1 + layout.counting_pass) + again
    passes = forward + shape.expert_layers
    row = float(layout.width * shape.hidden)
    counts = 8.0 * shape.experts * _leaving(ranks)
    # A token has `chosen` distinct experts; each rank holds experts / ranks of them.
    here, away = min(chosen, shape.experts // ranks), min(chosen, shape.experts - shape.experts // ranks)
    alike, most = 2 * chosen * _leaving(ranks), away + (ranks - 1) * here
    return replace(
        found,
        tokens=layout.accumulation * (passes * layout.tokens * row * alike + forward * counts),
        tokens_at_most=layout.accumulation * (passes * layout.tokens * row * most + forward * counts),
        dispatches=layout.accumulation * (2.0 * passes + forward),
    )


def _of_states(shape: Shape, layout: Layout) -> Traffic:
    """Traffic of gradients and parameters in one optimizer step.

    Rajbhandari et al. 2020, section 7: stages 0, 1 and 2 move two elements per parameter, stage 3 three. DeepSpeed
    0.19.8 moves more: stages 1 and 2 all-reduce gradients of which a rank then keeps a part (two elements, plus one to
    gather parameters), and stages 2 and 3 reduce once per micro-batch. It moves less at stage 3 if parameters stay
    gathered (`launch.plan.gathered`).
    """
    ranks, same = layout.zero_ranks, layout.world // layout.expert
    whole, every = float(shape.trained_parameters), layout.accumulation
    buffered = layout.stage == 0 or layout.bf16_optimizer
    times = math.ceil(whole / (BUFFERED_ALLREDUCE if buffered else layout.size("reduce_bucket_size", whole)))
    reductions = every if layout.stage >= 2 else 1
    each = reductions * (1 if layout.stage == 3 else 2) * layout.reduced  # bytes per gradient element
    experts = float(shape.expert_parameters)
    found = Traffic(
        gradients=each * (whole - experts) * _leaving(ranks),
        parameters=_exchanged(shape, layout) + _teacher_traffic(shape, layout),
        # for gradients, for each group's parameters, and one exchange of status per step
        collectives=reductions * times + (len(shape.groups) if layout.stage else 0) + 1,
        of_experts=each * experts * _leaving(same),
    )
    if layout.stage == 0:
        return found
    if layout.stage < 3:
        gathered = layout.width * (whole - experts) * _leaving(ranks)
        of_experts = layout.width * experts * _leaving(same)
    else:
        gathered = bytes_gathered(shape, layout) * _leaving(ranks)
        of_experts = bytes_gathered(shape, layout, experts=True) * _leaving(same)
        second_copy = bytes_gathered(shape, layout, second_copy=True) * _leaving(layout.secondary)
        found = replace(found, second_copy=second_copy, collectives=every * (times + 2 * (shape.layers + 2)))
    return replace(found, parameters=found.parameters + gathered, of_experts=found.of_experts + of_experts)


def _exchanged(shape: Shape, layout: Layout) -> float:
    """[bytes] FP32 matrices sent to the rank that computes their update, and back, for optimizers of whole matrices.
    Shared experts are updated where they are, except one that is divided between two ranks."""
    if not OPTIMIZERS[layout.config.optimizer.name].splits_matrices or layout.stage == 0:
        return 0.0
    staying = sum(group.parameters for group in shape.groups if group.matrix and group.shared > 1)
    return 8.0 * (shape.hidden_matrix_parameters - staying) / layout.zero_ranks * _leaving(layout.zero_ranks)


def _teacher_traffic(shape: Shape, layout: Layout) -> float:
    """[bytes] Parameters of a sharded teacher, gathered in every micro-batch."""
    if shape.teacher is None or not layout.config.distill.sharded:
        return 0.0
    gathered = float(layout.accumulation * shape.teacher.width * shape.teacher.shape.parameters)
    return gathered * _leaving(layout.zero_ranks)


def ring_bandwidth(device: Device, world: int) -> float:
    """[bytes/s] Speed of a ring over `world` ranks."""
    return device.link if world <= device.per_node else min(device.link, device.network)


@dataclass(frozen=True)
class Speed:
    compute_seconds: float
    communication_seconds: float
    step_seconds: float
    tokens_per_step: float

    @property
    def tokens_per_second(self) -> float:
        """[tokens/s] Throughput of all devices together."""
        return self.tokens_per_step / self.step_seconds

    @property
    def share(self) -> float:
        """[fraction] Share of the step spent waiting for the network."""
        return 1 - self.compute_seconds / self.step_seconds


def speed(
    shape: Shape,
    layout: Layout,
    device: Device,
    *,
    mfu: float = DEFAULT_MFU,
    efficiency: float = 0.8,
    latency: float = LATENCY_SECONDS,
    fill: float = 1.0,
) -> Speed:
    """Duration of one step.

    mfu: share of the peak reached by computed FLOPs, including recomputed ones. efficiency: share of the link bandwidth
    reached by collectives. Without overlap_comm, compute and communication add up; with it, the longer of the two
    counts. fill: share of the places of a step's rows that hold tokens.
    """
    tokens, moved = layout.tokens * layout.accumulation * fill, traffic(shape, layout)
    compute = tokens * computed_flops(shape, layout) / (matmul_peak(layout, device) * mfu)

    def seconds(sent: float, collectives: float, *, ranks: int, across: int) -> float:
        """Duration among `ranks` ranks spread over `across` consecutive ones."""
        return sent / (ring_bandwidth(device, across) * efficiency) + collectives * latency * math.log2(ranks)

    # neighbours in ZeRO's ring are `layout.tensor` ranks apart
    states = moved.gradients + moved.parameters + moved.of_experts
    communication = seconds(states, moved.collectives, ranks=layout.zero_ranks, across=layout.world)
    communication += seconds(moved.second_copy, 0.0, ranks=layout.secondary, across=layout.secondary)
    communication += seconds(moved.sequences, moved.trades, ranks=layout.sharing, across=layout.sharing)
    communication += seconds(moved.sums, moved.reductions, ranks=layout.tensor, across=layout.tensor)
    communication += seconds(moved.tokens, moved.dispatches, ranks=layout.expert, across=layout.expert)
    step = max(compute, communication) if layout.overlap else compute + communication
    return Speed(compute, communication, step, tokens * layout.zero_ranks)


def matmul_peak(layout: Layout, device: Device) -> float:
    """[FLOP/s] Peak of the device in the dtype of the run's matmuls."""
    return device.peak_fp32 if layout.compute == "fp32" and not layout.manifest else device.peak


def mfu_of(tokens_per_second: float, shape: Shape, layout: Layout, device: Device) -> float:
    """The `mfu` for which `speed` yields a measured throughput, counting communication as compute."""
    return tokens_per_second / layout.zero_ranks * computed_flops(shape, layout) / matmul_peak(layout, device)


def computed_flops(shape: Shape, layout: Layout) -> float:
    """[FLOP] Cost of one token on one rank: forward, backward, recomputation, and passes of reference and teacher. With
    expert parallelism, ranks process each other's tokens, which costs the same as having all experts."""
    shape = shape.own if layout.expert == 1 else shape
    again = recomputed_share(shape, layout) + layout.reference_pass + layout.counting_pass
    flops = shape.flops_per_token(layout.sequence) + again * shape.forward_flops(layout.sequence)
    return flops + (shape.teacher.shape.forward_flops(layout.sequence) if shape.teacher else 0.0)
