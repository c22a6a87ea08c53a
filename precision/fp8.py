"""Linear layers whose matmuls have FP8 operands: a manifest's `fp8`. docs/fp8.md says what is rounded and why.

For y = x W^T with gradient g of y, the operands are rounded to 8 bits, each over the dimension that is summed:

    y  = q(x) q(W)^T        x by token, W by output feature
    dx = q(g) q(W)          g by token, W by input feature
    dW = g^T x              in the dtype around the layer, or from q(g) and q(x), both over the tokens

Scales are powers of two, the smallest with which the largest value still fits: dividing by them is exact. An operand
with a value that is not finite becomes nan throughout its row: the cast alone would turn inf into 448 and hide it.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional

from config.errors import one_line
from config.schema import Fp8Section
from precision.fp8_reference import Product, off_by, operands
from precision.shared_inputs import cast_once

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
BLOCK = 32
"""Values that share a scale with `block32`, as in OCP's Microscaling Formats 1.0."""
_EXPONENTS = (-126, 127)  # exponents of normal FP32 numbers
_ALIGNED = 16  # FP8 matmuls on GPUs need weight dimensions that are multiples of this
_TRIED_TOKENS, _TRIED_FEATURES = 64, 4096  # a kernel is tested with at most this many of a layer's features

Count = Callable[[str, torch.Tensor, torch.Tensor], None]
"""Called with an operand's name (input, weight, gradient), its values, and the same rounded to FP8."""

OPERANDS = ("input", "weight", "gradient")

Narrow = tuple[torch.Tensor, torch.Tensor | None]
"""FP8 values and their scales; or the values that they represent, in FP32, and None."""
RowRounding = Callable[[torch.Tensor, torch.dtype], Narrow]

_multiplying = False
_round_rows: RowRounding | None = None


def round_rows_by(kernel: RowRounding | None) -> None:
    """Round rows on GPUs with this kernel from now on, instead of torch's operators."""
    global _round_rows
    _round_rows = kernel


def is_multiplying() -> bool:
    """Whether the matmul now running, in whatever dtype, has operands rounded to FP8."""
    return _multiplying


def scale_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP32, shaped like `largest`: the smallest power of two s with largest / s within the format; nan where `largest`
    is not finite."""
    mantissa, exponent = torch.frexp(largest)
    top_mantissa, top_exponent = math.frexp(torch.finfo(dtype).max)
    power = exponent - top_exponent + (mantissa > top_mantissa).to(exponent.dtype)
    # built from its bits: torch.ldexp multiplies by pow(2, n), which CUDA does not promise to be exact
    scale = (power.clamp(*_EXPONENTS).int() + 127 << 23).view(torch.float32)
    return torch.where(largest.isfinite(), scale, torch.nan)


def quantise(values: torch.Tensor, dim: int | None, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """values / scale in `dtype`, and the FP32 scale: one for all values along `dim`, or a single one if it is None."""
    wide = values.float()
    largest = wide.abs().amax() if dim is None else wide.abs().amax(dim, keepdim=True)
    scale = scale_of(largest, dtype)
    return (wide / scale).to(dtype), scale


def rounded(values: torch.Tensor, dim: int, dtype: torch.dtype, scaling: str) -> torch.Tensor:
    """`values` rounded to FP8 and back, in FP32. dim: the one summed in the matmul. scaling: as in Fp8Section."""
    if scaling == "block32":
        last = values.movedim(dim, -1)
        size = last.shape[-1]
        blocks = functional.pad(last, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
        return rounded(blocks, -1, dtype, "row").flatten(-2)[..., :size].movedim(-1, dim)
    narrow, scale = quantise(values, None if scaling == "tensor" else dim, dtype)
    return narrow.float() * scale


class FlushMeter:
    """Counts, by module and operand, nonzero values and how many of them rounding flushes to zero."""

    def __init__(self, modules: Sequence[str], device: torch.device) -> None:
        self.modules = tuple(modules)
        self.counts = torch.zeros(len(self.modules), len(OPERANDS), 2, dtype=torch.float64, device=device)
        """(modules, operands, 2): values flushed to zero, values that were nonzero."""
        self._rows = dict(zip(self.modules, self.counts, strict=True))

    def of(self, module: str) -> Count:
        """A function to call with the operands of a module."""

        def count(operand: str, values: torch.Tensor, narrow: torch.Tensor) -> None:
            given = values != 0
            flushed = given & (narrow == 0)
            self._rows[module][OPERANDS.index(operand)] += torch.stack([flushed.sum(), given.sum()])

        return count

    def shares(self, counts: torch.Tensor) -> dict[str, dict[str, float]]:
        """Share of values that were flushed to zero, by module and operand. counts: the meter's, summed over ranks."""
        found = (counts[..., 0] / counts[..., 1].clamp(min=1)).tolist()
        return {name: dict(zip(OPERANDS, row, strict=True)) for name, row in zip(self.modules, found, strict=True)}


def no_kernel(weight_shape: Sequence[int], device: torch.device, ambient: torch.dtype, section: Fp8Section) -> str:
    """Why a layer's products are not computed by torch._scaled_mm; empty if they are."""
    if section.kernel == "emulate":
        return "precision.fp8.kernel = emulate"
    if section.scaling == "block32":
        return "it has no scales by block"
    if device.type == "cpu":
        wanted = section.kernel == "scaled_mm" and ambient in (torch.bfloat16, torch.float32)
        return "" if wanted else "on a CPU it needs BF16 or FP32 around the layer, and is no faster"
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (9, 0):
        return f"it needs a GPU of compute capability 9.0, and this is {device}"
    if ambient != torch.bfloat16:
        return f"it needs BF16 around the layer, and there is {str(ambient).removeprefix('torch.')}"
    if any(size % _ALIGNED for size in weight_shape):
        return f"{_ALIGNED} does not divide its weight's sizes {tuple(weight_shape)}"
    return ""


def kernel_problem(
    weight_shape: Sequence[int], device: torch.device, ambient: torch.dtype, section: Fp8Section
) -> str | None:
    """The fault of torch._scaled_mm for this layer: it raises, or one of the three products is further from FP8's
    definition than summation and rounding to the dtype around the layer explain. None if it is correct."""
    generator = torch.Generator().manual_seed(0)
    out, width = (min(size, _TRIED_FEATURES) for size in weight_shape)
    given = [
        torch.randn(shape, generator=generator).to(device)
        for shape in ((_TRIED_TOKENS, width), (out, width), (_TRIED_TOKENS, out))
    ]
    inputs, weight, gradient = given[0].to(ambient).requires_grad_(), given[1].requires_grad_(), given[2].to(ambient)
    try:
        output = _Linear.apply(inputs, weight, _How(ambient, section, True), None)
        output.backward(gradient)
        found: dict[Product, Any] = {
            "output": output.detach(),
            "input gradient": inputs.grad,
            "weight gradient": weight.grad,
        }
        for product, values in found.items():
            left, right = operands(product, inputs.detach(), weight.detach(), gradient, section)
            off, allowed = off_by(values, left, right, ambient)
            if not off <= allowed:
                return f"its {product} is {off / allowed:.3g} times as far from FP8's definition as rounding explains"
    except Exception as problem:  # whatever torch and the device's libraries may raise
        return f"it fails: {one_line(problem, 200)}"
    return None


def linear_fp8(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    ambient: torch.dtype,
    section: Fp8Section,
    count: Count | None = None,
    kept: dict[Any, Any] | None = None,
) -> torch.Tensor:
    """inputs W^T + bias in `ambient`. weight: (out, in), the FP32 master. count: gets every operand and its rounding.
    kept: the result of `SharedInputs.at` for these inputs."""
    if not inputs.numel():  # an expert without tokens: no values to scale by
        return functional.linear(inputs.to(ambient), weight.to(ambient), None if bias is None else bias.to(ambient))
    kernel = not no_kernel(weight.shape, inputs.device, ambient, section)
    values, narrow = cast_once(kept, inputs, ambient), None
    if kept is not None:
        if kernel not in kept:
            kept[kernel] = _narrow(values.detach().flatten(0, -2), FORMATS["e4m3"], section.scaling, kernel)
        narrow = kept[kernel]
    output = _Linear.apply(values, weight, _How(ambient, section, kernel, count), narrow)
    return output if bias is None else output + bias.to(ambient)


class _How(NamedTuple):
    """How a layer's products are computed."""

    ambient: torch.dtype
    section: Fp8Section
    kernel: bool
    counter: Count | None = None


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, how: _How, narrow: Narrow | None) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.how = how
        rows, e4m3 = inputs.flatten(0, -2), FORMATS["e4m3"]
        output = _product(("input", rows, e4m3), ("weight", weight, e4m3), how, narrow)
        return output.view(*inputs.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        e4m3, of_gradient = FORMATS["e4m3"], FORMATS[ctx.how.section.gradient]
        rows, of_inputs, of_weight = gradient.flatten(0, -2), None, None
        if ctx.needs_input_grad[0]:
            operands = ("gradient", rows, of_gradient), ("weight", weight.t(), e4m3)
            of_inputs = _product(*operands, ctx.how).view_as(inputs)
        if ctx.needs_input_grad[1]:
            columns = inputs.flatten(0, -2).t()
            if ctx.how.section.weight_gradient == "fp8":
                of_weight = _product(("gradient", rows.t(), of_gradient), ("input", columns, e4m3), ctx.how)
            else:
                of_weight = rows.t() @ columns.t()
            of_weight = of_weight.to(weight.dtype)
        return of_inputs, of_weight, None, None


_Operand = tuple[str, torch.Tensor, torch.dtype]


def _narrow(values: torch.Tensor, dtype: torch.dtype, scaling: str, kernel: bool) -> Narrow:
    """(rows, summed) rounded over the last dimension, and contiguous along it if a kernel multiplies it."""
    if not kernel:
        return rounded(values, -1, dtype, scaling), None
    if _round_rows is not None and values.is_cuda and scaling == "row":
        return _round_rows(values, dtype)
    return quantise(values.contiguous(), None if scaling == "tensor" else -1, dtype)


def _product(left: _Operand, right: _Operand, how: _How, left_narrow: Narrow | None = None) -> torch.Tensor:
    """left right^T in `ambient`, from (rows, summed) and (columns, summed), each rounded over its last dimension.
    left_narrow: the left operand, if it is already rounded."""
    global _multiplying
    ambient, section, kernel, count = how
    kernel = kernel and (left[1].device.type == "cpu" or left[1].shape[-1] % _ALIGNED == 0)
    rows, row_scales = left_narrow or _narrow(*left[1:], section.scaling, kernel)
    columns, column_scales = _narrow(*right[1:], section.scaling, kernel)
    if count is not None:
        for (name, values, _), narrow in ((left, rows), (right, columns)):
            count(name, values, narrow.float())
    if row_scales is not None and column_scales is not None:
        return torch._scaled_mm(
            rows,
            columns.t(),
            scale_a=row_scales,
            scale_b=column_scales.t(),
            out_dtype=ambient,
            use_fast_accum=False,  # which sums with fewer bits than FP32 on Hopper
        )
    exact = torch.bfloat16 if ambient == torch.bfloat16 else torch.float32
    _multiplying = True
    try:
        return functional.linear(rows.to(exact), columns.to(exact)).to(ambient)
    finally:
        _multiplying = False
