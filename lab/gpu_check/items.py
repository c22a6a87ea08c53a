"""What the GPU check measures: the items of each of its six parts, the most valuable first.

`seconds` is what an item is expected to take on one H200, a start of 15 s for each of its jobs included. All are
estimates: none has been measured. An item is not started when less time than that is left. Items that time nothing run
some at once (`lab.gpu_check.run`); a part lists them before those that have the device to themselves, or after.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lab.gpu_check import measure
from lab.gpu_check.bench import Bench


@dataclass(frozen=True)
class Item:
    """A row of a part's table, or several of one kind."""

    name: str
    """Unique in its part; names its files."""
    what: str
    seconds: float
    """Expected."""
    measure: Callable[[Bench], measure.Figures]
    against: str | None = None
    """The item of the same part whose losses its own are compared with."""
    needs: str = ""
    """What not every machine has, as `lab.gpu_check.machine.lacks` names it; without it the item is skipped."""
    timed: bool = True
    """Whether its figures are of time: then nothing runs beside it. Without, it has no tokens/s."""


@dataclass(frozen=True)
class Part:
    """What is measured in one call."""

    title: str
    items: tuple[Item, ...]
    left_out: str = ""
    """What the part should have and does not, as it does not exist yet."""


def _steps(
    name: str, what: str, *overrides: str, seconds: float = 20, against: str | None = None, needs: str = ""
) -> Item:
    """Twenty steps of the demo."""
    return Item(name, what, seconds, lambda bench: measure.steps(bench, *overrides), against, needs, timed=False)


def _layout(stage: int, compute: str, *, against: str | None) -> Item:
    # Steps that are skipped while the scale settles would make the losses differ.
    scale = ("precision.loss_scale.initial=4096",) if compute == "fp16" else ()
    what = f"ZeRO-{stage} in {compute.upper()}, 20 steps"
    overrides = (f"deepspeed.stage={stage}", f"precision.compute={compute}", *scale)
    return _steps(f"zero{stage}-{compute}", what, *overrides, against=against)


def _layouts(compute: str) -> list[Item]:
    """Stages 1 to 3; ZeRO-0 is refused in 16 bits."""
    first = f"zero1-{compute}"
    return [_layout(stage, compute, against=first if stage > 1 else "zero0-fp32") for stage in (1, 2, 3)]


SMOKE = (
    Item("demo", "the demo: BF16, ZeRO-2", 60, lambda bench: measure.demo(bench, "demo")),
    Item("replay", "a planted NaN: found, named, and repeated by replay", 40, measure.replayed, timed=False),
    _steps("kernels-torch", "torch's kernels, SDPA, not compiled", "model.kernels=torch"),
    _steps(
        *("kernels-liger", "Liger's kernels", "model.kernels=liger"), seconds=30, against="kernels-torch", needs="liger"
    ),
    _steps(
        *("compile", "blocks compiled", "model.kernels=torch", "model.compile=true"),
        seconds=60,
        against="kernels-torch",
    ),
    Item("resume", "killed with SIGKILL, resumed, beside an undisturbed run", 70, measure.resumed, timed=False),
    Item("export", "a checkpoint exported, every tensor compared", 35, measure.exported, timed=False),
    _steps(
        *("manifest", "manifest path, BF16 by config/manifests/bf16.json, ZeRO-2", "precision.compute=auto"),
        *("precision.manifest=config/manifests/bf16.json", "model.kernels=torch"),
        against="kernels-torch",
    ),
    _layout(0, "fp32", against=None),
    *_layouts("bf16"),
    Item(
        *("demo-fp16", "the demo of FP16: overflows, skipped steps", 35),
        lambda bench: measure.demo(bench, "demo_fp16"),
        timed=False,
    ),
    _steps(
        *("attention-flex", "flex attention", "model.kernels=torch", "model.attention=flex_attention"),
        seconds=45,
        against="kernels-torch",
        needs="flex",
    ),
    _steps(
        *("attention-flash", "FlashAttention 2, where flash-attn is installed", "model.kernels=torch"),
        "model.attention=flash_attention_2",
        against="kernels-torch",
        needs="flash",
    ),
    *_layouts("fp16"),
    *_layouts("fp32"),
    _steps(
        *("attention-eager", "eager attention", "model.kernels=torch", "model.attention=eager"), against="kernels-torch"
    ),
)

LLAMA_160M = (
    "model.config={hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, "
    "num_key_value_heads: 12, head_dim: 64, tie_word_embeddings: false}",
    *("data.sequence_length=1024", "batch.micro_size=8", "batch.global_size=16", "model.kernels=torch"),
)
"""163 million parameters at the recipe's vocabulary of 32,768."""


def _cells(stage: int) -> Item:
    cells = f"ZeRO-{stage}, accumulation 4, clipping on, checkpointing none"
    one_cell = f"FP16 manifest, {cells}"
    what = f"precision matrix at ZeRO-{stage}, one rank, accumulation and clipping"
    return Item(
        *(f"matrix-zero{stage}", what, 50),
        lambda bench: measure.matrix(bench, bench.either(cells, one_cell)),
        timed=False,
    )


IN_FP8 = (*LLAMA_160M, "precision.compute=auto", "precision.manifest=config/manifests/fp8.json")


def _fp8(kernel: str, what: str, *, against: str | None = None) -> Item:
    overrides = (*IN_FP8, f"precision.fp8.kernel={kernel}")
    return Item(
        *(f"fp8-{kernel}", what, 30),
        lambda bench: measure.steps(bench, *overrides, recipe="benchmark_1b"),
        against,
        timed=False,
    )


NUMERICS = (
    Item(
        *("nan-compile", "a planted NaN in compiled blocks: named", 70),
        lambda bench: _attributed(bench, "compile"),
        timed=False,
    ),
    Item(
        *("nan-liger", "a planted NaN with Liger's kernels: named", 30),
        lambda bench: _attributed(bench, "liger"),
        needs="liger",
        timed=False,
    ),
    _fp8("emulate", "a 160M Llama's linear layers in FP8, emulated"),
    _fp8("scaled_mm", "the same by the GPU's FP8 matmuls", against="fp8-emulate"),
    _cells(2),
    _cells(3),
    Item(
        *("analyze-160m", "a 160M Llama's regions, measured", 120),
        lambda bench: measure.analyzed(bench, *LLAMA_160M),
        timed=False,
    ),
    _cells(1),
    _cells(0),
    Item(
        *("parity-160m", "a 160M Llama in BF16, its FP32 twin, single steps", 150),
        lambda bench: measure.parity(bench, *LLAMA_160M),
    ),
    Item(
        *("parity-fp8", "that Llama in FP8 as `auto` has it, its FP32 twin, single steps", 180),
        lambda bench: measure.parity(bench, *IN_FP8),
    ),
)


def _attributed(bench: Bench, kernels: str) -> measure.Figures:
    chosen = {"compile": ("model.kernels=torch", "model.compile=true"), "liger": ("model.kernels=liger",)}
    return measure.attributed(bench, *chosen[kernels])


AT_2048 = ("batch.micro_size=8", "batch.global_size=16")
AT_4096 = ("data.sequence_length=4096", "batch.micro_size=4", "batch.global_size=8")
TITAN = "torchtitan,torchtitan-compile"
"""Passed over where it is not installed."""
SPEED = (
    Item(
        *("peers-2048", "1B shape, BF16, ZeRO-1, 2,048 tokens", 290),
        lambda bench: measure.compared(bench, f"mantissa,bare,trainer,{TITAN},mantissa-torch", *AT_2048),
    ),
    Item(
        *("peers-4096", "1B shape, 4,096 tokens", 240),
        lambda bench: measure.compared(bench, f"mantissa,bare,trainer,{TITAN}", *AT_4096),
    ),
    Item(
        *("peers-2048-again", "the first once more without torchtitan, in the other order, for the spread", 170),
        lambda bench: measure.compared(bench, "mantissa-torch,trainer,bare,mantissa", *AT_2048),
    ),
    Item(
        *("compile-2048", "compiled blocks beside torch's kernels", 120),
        lambda bench: measure.compared(bench, "mantissa-torch,mantissa-compile", *AT_2048),
    ),
)
"""Contestants in this order: what is killed has measured the first ones."""

SMALL_BATCH = ("batch.micro_size=4", "batch.global_size=8")
PLAIN = (*SMALL_BATCH, "model.kernels=torch")
"""With the kernels of a plain loop."""
PRECISION = (
    Item(
        *("dtypes", "1B shape: BF16, FP32 with TF32 off, FP16", 200),
        lambda bench: measure.compared(bench, "mantissa-bf16,mantissa-fp32,mantissa-fp16", *SMALL_BATCH, count=6),
    ),
    Item(
        *("manifest", "manifest path over cast path, both ZeRO-3 in BF16", 160),
        lambda bench: measure.compared(
            bench, "mantissa-bf16,mantissa-manifest", "deepspeed.stage=3", *SMALL_BATCH, count=6
        ),
    ),
    Item(
        *("dtypes-again", "those in 16 bits once more, for the spread", 120),
        lambda bench: measure.compared(bench, "mantissa-fp16,mantissa-bf16", *SMALL_BATCH, count=6),
    ),
)

ON_DEVICE = {16: 20, 48: 57, 56: 66, 64: 75, 96: 111, 112: 130}
"""[GiB] Planned for so many layers of the 1B shape at ZeRO-1."""
MEMORY = (
    Item("loss-128k", "loss of 8,192 tokens at a vocabulary of 131,072", 40, measure.loss_of_logits),
    Item(
        *("offload", "ZeRO-3 with CPU offload: layers that train", 160),
        lambda bench: measure.largest(
            bench,
            "16,80",
            *("deepspeed.stage=3", "deepspeed.offload=cpu", "model.activation_checkpointing=full"),
            *("batch.micro_size=1", "batch.global_size=2"),
        ),
    ),
    Item(
        *("on-device", "ZeRO-1 on the device alone: layers that train", 100),
        lambda bench: measure.largest(
            bench,
            measure.depths_around(bench, ON_DEVICE),
            *("model.activation_checkpointing=full", "batch.micro_size=1", "batch.global_size=2"),
        ),
    ),
    Item(
        *("activations", "1B shape: modes of activation checkpointing", 200),
        lambda bench: measure.activations(bench, "none,ops,selective:2,full", "model.kernels=torch", *AT_2048),
    ),
)

COST = (
    Item("guard", "Mantissa's steps over a plain loop's", 90, lambda bench: measure.guarded(bench, *PLAIN)),
    Item(
        "telemetry",
        "a step with telemetry, which the heat maps show",
        70,
        lambda bench: measure.extra(bench, "telemetry", *PLAIN),
    ),
    Item(
        "observation",
        "a step whose dtypes are observed",
        70,
        lambda bench: measure.extra(bench, "observation", *PLAIN),
    ),
    Item(
        "save",
        "steps during a save in the background",
        180,
        lambda bench: measure.extra(bench, "save", *PLAIN, pairs=3),
    ),
    Item(
        "checks",
        "steps with the checks for silent data corruption",
        90,
        lambda bench: measure.extra(bench, "checks", *PLAIN, pairs=5),
    ),
    Item("by-stage", "a guarded step, stage by stage", 60, lambda bench: measure.by_stage(bench, *PLAIN)),
)

PARTS = {
    1: Part("smoke", SMOKE),
    2: Part("numerics on the GPU's own kernels", NUMERICS),
    3: Part("speed", SPEED),
    4: Part("precision", PRECISION),
    5: Part("memory", MEMORY),
    6: Part("cost of trust", COST),
}
