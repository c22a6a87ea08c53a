"""Bytes, FLOPs and launches of a step on a GPU, counted without one: Mantissa, torchtitan, the Hugging Face Trainer.

    python -m lab.benchmark.anchors --config config/recipes/benchmark_1b.yaml [key.sub=value ...]

The model of each runs forward and backward on tensors without values; bytes and launches are those of its operators,
its loss and everything done once a step (docs/performance.md says what is taken from whose code). torchtitan is left
out if it is not installed (`make titan`). Exit code 0; 2 when the config is wrong.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.launcher import as_launched
from lab.benchmark.peers.titan_loop import add_missing_name
from launch.plan.counted import count_operations
from launch.plan.layout import Layout, layout_of
from launch.plan.model import Shape, model_of, read_shape
from launch.plan.operations import Operation, fused
from launch.plan.timed import SOFTMAX_BYTES, gradient_bytes, kernels_of, loss_operations, step_bytes
from tracking import terminal
from tracking.pages.markdown import Table

_COMPILED_SOFTMAX = 8.0
"""[bytes] Traffic of a compiled cross-entropy per logit: read for the sums and for the loss, read and overwritten by
its gradient in 16 bits."""
_TITAN_CHUNKS = 8
"""Number of chunks of torchtitan's loss."""
_ADAMW, _CLIPPED = 28.0, 12.0
"""[bytes] Traffic of fused AdamW and of clipping by a norm per FP32 value."""
_FSDP_GATHERED = 4 + 2 + 2 + 2
"""[bytes] Traffic of FSDP2 per value in a forward pass: cast into its group's buffer, and copied out of it."""
_FSDP_REDUCED = 2 + 4 + 8 + 4
"""[bytes] Traffic of FSDP2 per gradient value: cast to FP32 into the buffer, and added to the sum."""


@dataclass(frozen=True)
class Counted:
    """One contestant's step."""

    name: str
    flops: float
    """[FLOP] Matmuls and attention of a step."""
    blocks: float
    """[bytes] Operators of a step's micro-batches, except head and loss."""
    loss: float
    """[bytes] Head and loss."""
    states: float
    """[bytes] Casts and sums of gradients, copies of weights, clipping, optimizer."""
    launches: float
    """[operators] Number of launches in a step."""

    @property
    def bytes(self) -> float:
        """[bytes] The whole step."""
        return self.blocks + self.loss + self.states


def contestants(config: Any, shape: Shape, layout: Layout) -> Iterator[Counted]:
    """Mantissa with each kind of kernels, then the others on the same work."""
    assert shape.counted is not None
    own = shape.counted.operations
    loss = list(loss_operations(shape, layout, fused_softmax=True))
    each = layout.accumulation * gradient_bytes(layout)
    states = shape.parameters * (each + sum(step_bytes(shape, layout).values()))
    steps = 4 * len(shape.modules)
    for name, kernels in (
        ("mantissa, torch's kernels", own),
        ("mantissa, Liger", kernels_of(own, layout, shape.architecture)),
        ("mantissa, compiled", fused(own, _block)),
    ):
        yield _counted(name, kernels, loss, states, layout, steps)
    whole = list(_whole_loss(shape, layout, SOFTMAX_BYTES["full"], chunks=1))
    summed = (layout.accumulation - 1) * 12.0  # the first gradient is kept, not added
    trainer = shape.parameters * (summed + _CLIPPED + _ADAMW)
    yield _counted("HF Trainer, autocast", _trainer(config, layout), whole, trainer, layout, steps)
    if find_spec("torchtitan") is None:
        return
    titan = _titan(config, layout)
    fsdp = shape.parameters * (layout.accumulation * (_FSDP_GATHERED + _FSDP_REDUCED) + _CLIPPED + _ADAMW)
    eager = list(_whole_loss(shape, layout, SOFTMAX_BYTES["full"], chunks=_TITAN_CHUNKS))
    # torch computes an RMSNorm in one kernel on a GPU
    norms = fused(titan, lambda one: "norm" if one.scope == "Norm" else None)
    yield _counted("torchtitan", norms, eager, fsdp, layout, steps)
    compiled = list(_whole_loss(shape, layout, _COMPILED_SOFTMAX, chunks=_TITAN_CHUNKS))
    yield _counted("torchtitan, compiled", fused(titan, _block), compiled, fsdp, layout, steps)


def _block(one: Operation) -> str | None:
    return None if one.scope == "outside" else "block"


def _counted(
    name: str, each: Sequence[Operation], loss: Sequence[Operation], states: float, layout: Layout, steps: int
) -> Counted:
    times = layout.accumulation
    return Counted(
        name,
        times * sum(one.flops for one in (*each, *loss)),
        times * sum(one.bytes for one in each),
        times * sum(one.bytes for one in loss),
        states,
        times * (len(each) + len(loss)) + steps,
    )


def _whole_loss(shape: Shape, layout: Layout, softmax: float, *, chunks: int) -> Iterator[Operation]:
    """Logits of all tokens, or of one chunk after another, in 16 bits, each with a gradient of the head."""
    tokens, head = layout.label_tokens / chunks, 2.0 * shape.vocabulary * shape.hidden
    logits, states = 2.0 * tokens * shape.vocabulary, 2.0 * tokens * shape.hidden
    for _ in range(chunks):
        for size in (logits + states + head,) * 3:
            yield Operation("matmul", "head", False, tokens * head, {0: size}, {})
        yield Operation("other", "head", False, 0.0, {0: softmax * logits / 2}, {})
        if chunks > 1:  # added to the gradient accumulated so far
            yield Operation("other", "head", True, 0.0, {0: 3 * head}, {})


def _trainer(config: Any, layout: Layout) -> list[Operation]:
    """The same model in FP32 under autocast."""
    model = model_of(config).float()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        ids = torch.zeros(layout.micro, layout.sequence, dtype=torch.int64)

        def run() -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return model(input_ids=ids, use_cache=False)

        return count_operations(model, model.model.layers, run, head=model.lm_head)


def _titan(config: Any, layout: Layout) -> list[Operation]:
    """torchtitan's Llama in the BF16 that FSDP2 gathers."""
    add_missing_name()
    from lab.benchmark.peers.titan_trainer import model_of as titan_of

    shape = model_of(config).config
    with torch.device("meta"):
        model: Any = titan_of(shape, length=layout.sequence, on_cuda=False).build()
    model.to(torch.bfloat16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        ids = torch.zeros(layout.micro, layout.sequence, dtype=torch.int64)
        blocks = list(model.layers.values())
        return count_operations(model, blocks, lambda: model(ids), head=model.lm_head)


@entry_point()
def main(argv: Sequence[str]) -> int:
    """The command line; its exit code."""
    parser = Arguments("python -m lab.benchmark.anchors", __doc__, allow_abbrev=False)
    _, arguments = parser.parse_known_args(list(argv))
    resolved = read_command_line(arguments, as_launched(1) | {"LOCAL_WORLD_SIZE": "1"})
    layout = layout_of(resolved, world=1, on_cpu=False)
    shape = read_shape(resolved.config, layout)
    head = ("counted, a step", "PFLOP", "TB", "blocks", "loss", "states", "launches")
    table = Table(head, title="Modelled, unmeasured")
    for one in contestants(resolved.config, shape, layout):
        sizes = [f"{size / 1e12:.3f}" for size in (one.bytes, one.blocks, one.loss, one.states)]
        table.add(one.name, f"{one.flops / 1e15:.3f}", *sizes, f"{one.launches:,.0f}")
    console = terminal.console(columns=120)
    console.print(table.grid(boxed=console.width >= 100))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
