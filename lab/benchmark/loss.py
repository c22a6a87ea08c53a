"""The cost of one micro-batch's loss, from hidden states to gradients: all logits at once, or chunks of them.

    python -m lab.benchmark.loss [--vocabulary 4096 32768 131072] [--hidden 1024] [--tokens 4096] [--dtype bf16]

A row is one implementation in its own process: milliseconds of a forward and backward pass (median of --repeats after
an untimed one), its peak memory without its inputs, and the relative error of the gradients against FP64 (L2 norm; left
out above 2^28 logits). `full` and `chunked` are the trainer's, `autograd` a loop over checkpointed chunks, `torch`
torch's own chunked linear_cross_entropy, since 2.13, `liger` Liger Kernel's, on CUDA. Exit code 3: one failed; its row
says why.
"""

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from itertools import product
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from config.cli import Arguments, entry_point
from config.errors import one_line
from config.schema import ModelSection
from lab.benchmark.harness import ALL_HOLD, FAILED, in_own_process, seconds_of
from modeling.chunked_head import loss_chunk
from modeling.linear_cross_entropy import Head, label_loss_sum, linear_cross_entropy
from precision.dtypes import DTYPES
from training.engine.work_time import forget_peak_memory, peak_memory_bytes

_MOST_LOGITS_IN_FP64 = 2**28
Way = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


def _full(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> Tensor:
    return label_loss_sum(functional.linear(hidden, weight).unsqueeze(0), labels.unsqueeze(0))


def _chunked(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, scale: float) -> Tensor:
    return linear_cross_entropy(hidden, Head(weight, None), labels, chunk_tokens=chunk, gradient_scale=scale)[0]


def _fused(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, scale: float) -> Tensor:
    from modeling.loss_kernel import fused_softmax

    head = Head(weight, None, softmax=fused_softmax)
    return linear_cross_entropy(hidden, head, labels, chunk_tokens=chunk, gradient_scale=scale)[0]


def _autograd(hidden: Tensor, weight: Tensor, labels: Tensor, chunk: int, _: float) -> Tensor:
    pairs = zip(hidden.split(chunk), labels.split(chunk), strict=True)
    return torch.stack([checkpoint(_full, part, weight, its, use_reentrant=False) for part, its in pairs]).sum()


def _torch(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> Tensor:
    options: Any = torch.nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(hidden, weight, labels, reduction="sum", options=options)


def _liger(hidden: Tensor, weight: Tensor, labels: Tensor, *_: Any) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(weight, hidden, labels)


def ways(device: str) -> dict[str, Way]:
    """The implementations that are available here, by name."""
    found: dict[str, Way] = {"full": _full, "chunked": _chunked, "autograd": _autograd}
    if hasattr(functional, "linear_cross_entropy"):
        found["torch"] = _torch
    if device == "cuda" and importlib.util.find_spec("triton") is not None:
        found["fused"] = _fused
    if device == "cuda" and importlib.util.find_spec("liger_kernel") is not None:
        found["liger"] = _liger
    return found


def measure(way: str, *, vocabulary: int, hidden: int, tokens: int, dtype: str, repeats: int) -> dict[str, Any]:
    """One row, measured in this process. Inputs are random and the same for every implementation."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    states = torch.randn(tokens, hidden, generator=generator, device=device).to(DTYPES[dtype]).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator, device=device).mul_(hidden**-0.5)
    weight = weight.to(DTYPES[dtype]).requires_grad_()
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device=device)
    chunk = loss_chunk(ModelSection(loss="chunked"), tokens=tokens, vocabulary=vocabulary, on_cpu=device == "cpu")
    scale = (65536.0 if dtype == "fp16" else 1.0) / tokens

    def once() -> Tensor:
        states.grad = weight.grad = None
        loss = ways(device)[way](states, weight, labels, chunk, scale)
        (loss * scale).backward()
        return loss.detach()

    counted = torch.device(device)
    forget_peak_memory(counted)
    before = peak_memory_bytes(counted)
    loss = float(once())
    peak = peak_memory_bytes(counted) - before
    seconds = [seconds_of(once, counted) for _ in range(repeats)]
    row = {"way": way, "vocabulary": vocabulary, "hidden": hidden, "tokens": tokens, "dtype": dtype, "chunk": chunk}
    row |= {"peak_bytes": peak, "seconds": median(seconds) if seconds else None, "loss": loss / tokens}
    if seconds and tokens * vocabulary <= _MOST_LOGITS_IN_FP64:
        row |= _errors(states, weight, labels, chunk, scale)
    return row


def row_of(way: str, **shape: Any) -> dict[str, Any]:
    """`measure` in its own process, whose allocator holds nothing of an earlier row; or why it failed."""
    try:
        return in_own_process(measure, way, **shape)
    except Exception as error:  # whatever it is, the other implementations can still be measured
        return {"way": way, **shape, "failed": one_line(error)}


def _errors(states: Tensor, weight: Tensor, labels: Tensor, chunk: int, scale: float) -> dict[str, float]:
    exact_states, exact_weight = (tensor.detach().double().requires_grad_() for tensor in (states, weight))
    _chunked(exact_states, exact_weight, labels, max(chunk // 4, 1), scale).mul(scale).backward()
    found = {}
    for name, tensor, exact in (("hidden_error", states, exact_states), ("weight_error", weight, exact_weight)):
        assert tensor.grad is not None and exact.grad is not None
        found[name] = float((tensor.grad.double() - exact.grad).norm() / exact.grad.norm())
    return found


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; one JSON line per row with --json, else a table."""
    parser = Arguments("python -m lab.benchmark.loss", __doc__)
    parser.add_argument("--vocabulary", type=int, nargs="+", default=[4096, 32768, 131072])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=["bf16"])
    parser.add_argument("--ways", nargs="+", default=None, help="only these")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes; 0 measures memory only")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.json:
        print("vocabulary dtype      way  chunk       ms  peak MiB  errors: hidden, weight")
    shape = {"hidden": options.hidden, "tokens": options.tokens, "repeats": options.repeats}
    failed = False
    for vocabulary, dtype, way in product(options.vocabulary, options.dtype, options.ways or ways(device)):
        row = row_of(way, **shape, vocabulary=vocabulary, dtype=dtype)
        failed |= "failed" in row
        print(json.dumps(row) if options.json else _line(row), flush=True)
    return FAILED if failed else ALL_HOLD


def _line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['vocabulary']:>10} {row['dtype']:>5} {row['way']:>8} failed: {row['failed']}"
    milliseconds = "" if row["seconds"] is None else f"{row['seconds'] * 1e3:.1f}"
    errors = f"{row['hidden_error']:.1e} {row['weight_error']:.1e}" if "hidden_error" in row else ""
    sizes = f"{row['vocabulary']:>10} {row['dtype']:>5} {row['way']:>8} {row['chunk']:>6}"
    return f"{sizes} {milliseconds:>8} {row['peak_bytes'] / 2**20:>9.0f}  {errors}"


if __name__ == "__main__":
    sys.exit(main())
