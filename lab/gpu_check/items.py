"""The items of the GPU check's six parts, most valuable first.

`seconds` is an item's expected duration on one H200, including 15 s of startup per job. All are estimates, none is
measured. An item is not started with less time than that left. Untimed items run concurrently (`lab.gpu_check.run`), so
a part lists them in one block before or after those that need the device to themselves.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lab.gpu_check import measure
from lab.gpu_check.bench import Bench


@dataclass(frozen=True)
class Item:
    """One measurement: a row of a part's table, or several variants."""

    name: str
    """Unique within the part; also names the item's files."""
    what: str
    seconds: float
    """[s] Expected duration."""
    measure: Callable[[Bench], measure.Figures]
    against: str | None = None
    """Item of the same part whose losses serve as the reference."""
    needs: str = ""
    """Requirement that some machines do not meet, a key of `lab.gpu_check.machine.lacks`; the item is then skipped."""
    timed: bool = True
    """Whether it measures speed and so runs alone; the tokens/s of an untimed item are dropped."""


@dataclass(frozen=True)
class Part:
    """Items measured in one call."""

    title: str
    items: tuple[Item, ...]


def _item(
    name: str,
    what: str,
    seconds: float,
    function: Callable[..., measure.Figures],
    *arguments: str,
    against: str | None = None,
    needs: str = "",
    timed: bool = True,
    **options: Any,
) -> Item:
    """An item that calls `function` of `measure` with these arguments."""
    return Item(name, what, seconds, lambda bench: function(bench, *arguments, **options), against, needs, timed)


def _steps(name: str, what: str, *overrides: str, seconds: float = 20, **options: Any) -> Item:
    """20 steps of the demo recipe."""
    return _item(name, what, seconds, measure.steps, *overrides, timed=False, **options)


def _layout(stage: int, compute: str) -> Item:
    # Steps skipped while the loss scale settles would make the losses differ.
    scale = ("precision.loss_scale.initial=4096",) if compute == "fp16" else ()
    what = f"ZeRO-{stage} in {compute.upper()}, 20 steps"
    overrides = (f"deepspeed.stage={stage}", f"precision.compute={compute}", *scale)
    against = (None, "zero0-fp32", f"zero1-{compute}", f"zero1-{compute}")[stage]
    return _steps(f"zero{stage}-{compute}", what, *overrides, against=against)


TORCH = "model.kernels=torch"
MANIFEST = ("precision.compute=auto", "precision.manifest=config/manifests/bf16.json", TORCH)
PLAIN_STEPS: dict[str, Any] = {"against": "kernels-torch"}


def _attention(kind: str, what: str, **options: Any) -> Item:
    name = f"attention-{kind.partition('_')[0]}"
    return _steps(name, what, TORCH, f"model.attention={kind}", **PLAIN_STEPS, **options)


SMOKE = (
    _item("demo", "the demo: BF16, ZeRO-2", 60, measure.demo, "demo"),
    _item("replay", "a planted NaN: found, named, and repeated by replay", 40, measure.replayed, timed=False),
    _steps("kernels-torch", "torch's kernels, SDPA, not compiled", TORCH),
    _steps("kernels-liger", "Liger's kernels", "model.kernels=liger", seconds=30, needs="liger", **PLAIN_STEPS),
    _steps("compile", "blocks compiled", TORCH, "model.compile=true", seconds=60, needs="compiler", **PLAIN_STEPS),
    _item("resume", "killed with SIGKILL, resumed, beside an undisturbed run", 70, measure.resumed, timed=False),
    _item("export", "a checkpoint exported, every tensor compared", 35, measure.exported, timed=False),
    _steps("manifest", "manifest path, BF16 by config/manifests/bf16.json, ZeRO-2", *MANIFEST, **PLAIN_STEPS),
    _layout(0, "fp32"),  # which is rejected in 16 bits
    *(_layout(stage, "bf16") for stage in (1, 2, 3)),
    _item("demo-fp16", "the demo of FP16: overflows, skipped steps", 35, measure.demo, "demo_fp16", timed=False),
    _attention("flex_attention", "flex attention", seconds=45, needs="flex"),
    _attention("flash_attention_2", "FlashAttention 2, where flash-attn is installed", needs="flash"),
    *(_layout(stage, compute) for compute in ("fp16", "fp32") for stage in (1, 2, 3)),
    _attention("eager", "eager attention"),
)

LLAMA_160M = (
    "model.config={hidden_size: 768, intermediate_size: 3072, num_hidden_layers: 12, num_attention_heads: 12, "
    "num_key_value_heads: 12, head_dim: 64, tie_word_embeddings: false}",
    *("data.sequence_length=1024", "batch.micro_size=8", "batch.global_size=16", TORCH),
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


def _fp8(kernel: str, what: str, **options: Any) -> Item:
    overrides = (*IN_FP8, f"precision.fp8.kernel={kernel}")
    return _item(f"fp8-{kernel}", what, 30, measure.steps, *overrides, recipe="benchmark_1b", timed=False, **options)


def _attributed(name: str, what: str, seconds: float, *overrides: str, needs: str = "") -> Item:
    return _item(name, what, seconds, measure.attributed, *overrides, needs=needs, timed=False)


NUMERICS = (
    _attributed(
        *("nan-compile", "a planted NaN in compiled blocks: named", 70, TORCH, "model.compile=true"), needs="compiler"
    ),
    _attributed("nan-liger", "a planted NaN with Liger's kernels: named", 30, "model.kernels=liger", needs="liger"),
    _fp8("emulate", "a 160M Llama's linear layers in FP8, emulated"),
    _fp8("scaled_mm", "the same by the GPU's FP8 matmuls", against="fp8-emulate"),
    _cells(2),
    _cells(3),
    _item("analyze-160m", "a 160M Llama's regions, measured", 120, measure.analyzed, *LLAMA_160M, timed=False),
    _cells(1),
    _cells(0),
    _item("parity-160m", "a 160M Llama in BF16, its FP32 twin, single steps", 150, measure.parity, *LLAMA_160M),
    _item("parity-fp8", "that Llama in FP8 as `auto` has it, its FP32 twin", 180, measure.parity, *IN_FP8),
)


AT_2048 = ("batch.micro_size=8", "batch.global_size=16")
AT_4096 = ("data.sequence_length=4096", "batch.micro_size=4", "batch.global_size=8")
TITAN = "torchtitan,torchtitan-compile"
"""Skipped if torchtitan is not installed."""
PEERS = f"mantissa,bare,trainer,{TITAN}"


def _compared(name: str, what: str, seconds: float, contestants: str, *overrides: str, **options: Any) -> Item:
    return _item(name, what, seconds, measure.compared, contestants, *overrides, **options)


SPEED = (
    _compared("peers-2048", "1B shape, BF16, ZeRO-1, 2,048 tokens", 290, f"{PEERS},mantissa-torch", *AT_2048),
    _compared("peers-4096", "1B shape, 4,096 tokens", 240, PEERS, *AT_4096),
    _compared(
        *("peers-2048-again", "the first repeated without torchtitan, in the other order, for the spread", 170),
        *("mantissa-torch,trainer,bare,mantissa", *AT_2048),
    ),
    _compared(
        *("compile-2048", "compiled beside torch's kernels", 120, "mantissa-torch,mantissa-compile", *AT_2048),
        needs="compiler",
    ),
)
"""Contestants are ordered by importance: an item that is killed has measured the first ones."""

SMALL_BATCH = ("batch.micro_size=4", "batch.global_size=8")
PLAIN = (*SMALL_BATCH, TORCH)
"""Torch's kernels, like the bare DeepSpeed loop."""
SIX_STEPS: dict[str, Any] = {"count": 6}
DTYPES = "mantissa-bf16,mantissa-fp32,mantissa-fp16"
MANIFESTS, AT_ZERO_3 = "mantissa-bf16,mantissa-manifest", ("deepspeed.stage=3", *SMALL_BATCH)
HALVES = "mantissa-fp16,mantissa-bf16"
PRECISION = (
    _compared("dtypes", "1B shape: BF16, FP32 with TF32 off, FP16", 200, DTYPES, *SMALL_BATCH, **SIX_STEPS),
    _compared("manifest", "manifest path over cast path, both ZeRO-3 in BF16", 160, MANIFESTS, *AT_ZERO_3, **SIX_STEPS),
    _compared("dtypes-again", "the 16-bit ones repeated, for the spread", 120, HALVES, *SMALL_BATCH, **SIX_STEPS),
)

ON_DEVICE = {16: 20, 48: 57, 56: 66, 64: 75, 96: 111, 112: 130}
"""[GiB] Planned device memory by number of layers, 1B shape at ZeRO-1."""
ONE_SEQUENCE = ("model.activation_checkpointing=full", "batch.micro_size=1", "batch.global_size=2")
MODES = "recompute-none,recompute-ops,recompute-selective,recompute-full"
OFFLOADED = ("deepspeed.stage=3", "deepspeed.offload=cpu", *ONE_SEQUENCE)
MEMORY = (
    _item("loss-128k", "loss of 8,192 tokens at a vocabulary of 131,072", 40, measure.loss_of_logits),
    _item("offload", "ZeRO-3 with CPU offload: layers that train", 160, measure.largest, "16,80", *OFFLOADED),
    Item(
        *("on-device", "ZeRO-1 on the device alone: layers that train", 100),
        lambda bench: measure.largest(bench, measure.depths_around(bench, ON_DEVICE), *ONE_SEQUENCE),
    ),
    _compared("activations", "1B shape: activation checkpointing", 200, MODES, TORCH, *AT_2048, count=5),
)

COST = (
    _item("guard", "Mantissa's steps over a plain loop's", 90, measure.guarded, *PLAIN),
    _item("telemetry", "a step with telemetry, which the heat maps show", 70, measure.extra, "telemetry", *PLAIN),
    _item("observation", "a step whose dtypes are observed", 70, measure.extra, "observation", *PLAIN),
    _item("save", "steps during a save in the background", 180, measure.extra, "save", *PLAIN, pairs=3),
    _item("checks", "steps with the checks for silent data corruption", 90, measure.extra, "checks", *PLAIN, pairs=5),
    _item("by-stage", "a guarded step, stage by stage", 60, measure.by_stage, *PLAIN),
)

PARTS = {
    1: Part("smoke", SMOKE),
    2: Part("numerics on the GPU's own kernels", NUMERICS),
    3: Part("speed", SPEED),
    4: Part("precision", PRECISION),
    5: Part("memory", MEMORY),
    6: Part("cost of trust", COST),
}
