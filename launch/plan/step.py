"""Memory of the optimizer step: a second copy of gradients, and temporaries of the optimizer besides its state."""

from config.optimizers import EXCHANGED_VALUES
from launch.plan.layout import Layout
from launch.plan.model import Group, Shape
from precision.split_masters import SPLIT_PIECE, SPLIT_PIECE_ON_A_GPU

TEMPORARIES = {
    "lion": ((4, 0),),  # the update direction
    "lamb": ((8, 16),),  # both corrected averages; a parameter and its squares in FP64
    # both corrected averages, squared gradients and their divisor; then the quotients of a parameter in FP64
    "stable_adamw": ((16, 0), (12, 8)),
    "muon": ((8, 0),),  # both corrected averages of everything but hidden matrices
}
"""[bytes] Temporaries of an update by optimizer: (per value of the flat tensor being updated, per value of the largest
parameter in it), one pair for each moment that may be the peak."""

_OF_A_PIECE = 13
"""[bytes] Per value of a split master while it is joined: two copies of its bits, its tie flag as byte and int32."""


def step_bytes(shape: Shape, layout: Layout) -> float:
    """[bytes] Peak memory of one rank in the optimizer step, besides model states.

    DeepSpeed updates one flat tensor after another: at stages 1 and 2 a rank's part of each parameter group, at stage 3
    of each sub-group, and without ZeRO each parameter. Flattened FP32 gradients stay until then.
    """
    rule = max((_rule_bytes(group, layout) for group in shape.groups), default=0.0)
    if layout.config.precision.masters == "split":
        piece = SPLIT_PIECE if layout.on_cpu else SPLIT_PIECE_ON_A_GPU
        rule += _OF_A_PIECE * min(piece, shape.divided / layout.zero_ranks)
    return _copied_gradients(shape, layout) + rule


def _copied_gradients(shape: Shape, layout: Layout) -> float:
    """[bytes] Size of flattened FP32 gradients."""
    part = shape.divided / layout.zero_ranks
    if layout.stage == 0 or layout.bf16_optimizer or "optimizer" in layout.offload:
        return 0.0
    if layout.stage == 3:
        return 4 * min(part, layout.size("sub_group_size"))
    return 0.0 if layout.stage == 2 and layout.width == 2 else 4 * part


def _rule_bytes(group: Group, layout: Layout) -> float:
    """[bytes] Temporaries of the optimizer for one flat tensor of a group."""
    flat, piece = _sizes(group, layout)
    if group.matrix:
        return 4 * flat + _exchange_bytes(group, layout)
    moments = TEMPORARIES.get(layout.config.optimizer.name, ())
    return float(max((of_flat * flat + of_piece * piece for of_flat, of_piece in moments), default=0))


def _sizes(group: Group, layout: Layout) -> tuple[float, float]:
    """[values] (size of a group's largest flat tensor, size of the largest parameter's piece in it)."""
    if layout.stage == 0:
        return group.largest, group.largest
    flat = group.parameters / layout.zero_ranks
    if layout.stage == 3:
        return min(flat, layout.size("sub_group_size")), group.largest / layout.zero_ranks
    return flat, min(group.largest / group.shared, flat)


def _exchange_bytes(group: Group, layout: Layout) -> float:
    """[bytes] Buffers for exchanging whole matrices with the rank that computes them, and Newton-Schulz temporaries.
    The FP32 iteration holds two copies of the matrix and two of its Gram matrix; with BF16 the FP32 result counts."""
    short, long = group.sides
    matrix = short * long
    iteration = 10.0 * matrix if layout.config.optimizer.orthogonalization == "bf16" else 8.0 * matrix + 8.0 * short**2
    if layout.stage == 0:
        return iteration
    batch = min(group.parameters, max(EXCHANGED_VALUES * layout.zero_ranks, matrix))
    sent = batch / layout.zero_ranks
    owned = max(sent, matrix)
    # received and reshaped matrices, plus either the iteration or the way back
    return 8 * owned + max(iteration, 4 * (owned + sent))
