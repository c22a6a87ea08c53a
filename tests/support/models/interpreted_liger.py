"""Let Triton's interpreter run Liger's kernels on a CPU: what triton 3.7 lacks for them. To be called before any runs.

Needs TRITON_INTERPRET=1 in the environment before triton is imported anywhere. Then numpy computes what a kernel says,
block by block. The interpreter knows no BF16 (it adds the bits), no float arguments with methods, and none of CUDA's
libdevice. They are put in its place here; the kernels themselves are Liger's.
"""

import os
from importlib.util import find_spec
from typing import Any

import torch


def why_not() -> str:
    """The reason why Liger's kernels cannot run here, for a skipped test; empty where they can."""
    for package in ("liger_kernel", "triton"):
        if find_spec(package) is None:
            return f"{package} is not installed"
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return "no GPU, and TRITON_INTERPRET=1 is not set"
    return ""


def prepare() -> torch.device:
    """The device to test on: the GPU, or a CPU whose interpreter has what the kernels need."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "own_implicit_cvt"):
        interpreter.own_implicit_cvt = interpreter._implicit_cvt
        interpreter._implicit_cvt = _with_floats
        builder = interpreter.InterpreterBuilder
        builder.own_binary_op, builder.own_cast_impl = builder.binary_op, builder.cast_impl
        builder.binary_op, builder.cast_impl = _binary_with_bfloat16, _cast_with_bfloat16
        rms_norm.rsqrt = lambda x: tl.rsqrt(x)
        geglu.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    return torch.device("cpu")


def _with_floats(argument: Any) -> Any:
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    if isinstance(argument, float):
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)
    return interpreter.own_implicit_cvt(argument)


def _widened(bits: Any) -> Any:
    """BF16, whose bits are uint16, as float32."""
    return torch.from_numpy(bits.copy()).view(torch.bfloat16).float().numpy()


def _narrowed(values: Any) -> Any:
    """float32 rounded to the nearest BF16, as uint16."""
    return torch.from_numpy(values.copy()).bfloat16().view(torch.uint16).numpy()


def _binary_with_bfloat16(self: Any, left: Any, right: Any, operation: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    if left.dtype.scalar != tl.bfloat16:
        return self.own_binary_op(left, right, operation)
    result = operation(_widened(left.data), _widened(right.data))
    if result.dtype == bool:
        return interpreter.TensorHandle(result, tl.int1)
    return interpreter.TensorHandle(_narrowed(result), tl.bfloat16)


def _cast_with_bfloat16(self: Any, source: Any, target: Any) -> Any:
    import triton.language as tl
    from triton.runtime import interpreter

    pair = (source.dtype.scalar, target.scalar)
    if pair == (tl.bfloat16, tl.float32):
        return interpreter.TensorHandle(_widened(source.data), tl.float32)
    if pair == (tl.float32, tl.bfloat16):
        return interpreter.TensorHandle(_narrowed(source.data), tl.bfloat16)
    return self.own_cast_impl(source, target)
