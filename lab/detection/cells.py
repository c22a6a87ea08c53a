"""The runs of the table: each defect in BF16, FP16 and under a manifest, each at another ZeRO stage; healthy runs."""

from __future__ import annotations

import json
import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product, zip_longest
from pathlib import Path

from config.cli import REPOSITORY
from config.deepspeed.document import read_document
from config.files import write_atomically
from lab.detection.defects import BF16, DEFECTS, FP16, MANIFEST, PATHS, TEAM, WATCHED, Defect
from lab.detection.healthy import drawn
from lab.detection.later import LATER
from tests.support.rows.chats import write_base, write_chats, write_pairs
from tools.parity.jobs import WALK

STEPS = 24
"""Steps of a run."""
TEXT = Path(sysconfig.get_path("stdlib"), "multiprocessing")
"""Text to train on: 270 kB of Python that no commit of this repository changes."""
_SHAPE = "num_hidden_layers: 2, num_attention_heads: 4, num_key_value_heads: 2"
_LLAMA = f"{{hidden_size: 64, intermediate_size: 128, {_SHAPE}, tie_word_embeddings: %s}}"
_DROPOUT = "resid_pdrop: 0.1, attn_pdrop: 0.1, embd_pdrop: 0.1"
_OTHER = f"{{hidden_size: 64, intermediate_size: 128, head_dim: 16, {_SHAPE}}}"
_SHORT = ("data.source=jsonl", "data.path={folder}/short.jsonl")
VARIANTS: dict[str, tuple[str, ...]] = {
    "plain": (f"model.config={_LLAMA % 'false'}",),
    "tied": (f"model.config={_LLAMA % 'true'}",),
    "documents": (f"model.config={_LLAMA % 'false'}", *_SHORT, "data.document_masking=true"),
    "dropout": ("model.architecture=gpt2", f"model.config={{n_embd: 64, n_layer: 2, n_head: 4, {_DROPOUT}}}"),
    "qwen3": ("model.architecture=qwen3", f"model.config={_OTHER}"),
    "gemma3": ("model.architecture=gemma3_text", f"model.config={_OTHER}"),
}
"""Models to train, and their data."""
_QUIET = "resid_pdrop: 0.0, attn_pdrop: 0.0, embd_pdrop: 0.0, summary_first_dropout: 0.0"
_GPT2 = f"{{n_embd: 64, n_layer: 2, n_head: 4, {_QUIET}}}"
_ROTARY = "{rope_type: llama3, rope_theta: 10000.0, factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, %s}"
_SCALED = _ROTARY % "original_max_position_embeddings: 32"
_EXPERTS = "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 32"
_TUNED = (
    *("model.architecture=null", "model.config={}", "model.name_or_path={folder}/base", "data.source=auto"),
    *("data.tokenizer=model", "data.sequence_length=96"),
)
_CHATS = (*_TUNED, "task=sft", "data.path={folder}/chats.jsonl")
_ADAPTER = "adapter={kind: lora, r: 4, alpha: 8}"
FURTHER_VARIANTS: dict[str, tuple[str, ...]] = {
    "scaled rotary": (f"model.config={_LLAMA[:-1] % 'false'}, rope_parameters: {_SCALED}}}",),
    "window": ("model.architecture=gemma3_text", f"model.config={_OTHER[:-1]}, sliding_window: 16}}"),
    "gemma2": ("model.architecture=gemma2", f"model.config={_OTHER[:-1]}, sliding_window: 16}}"),
    "gpt2": ("model.architecture=gpt2", f"model.config={_GPT2}"),
    "gpt2 documents": ("model.architecture=gpt2", f"model.config={_GPT2}", *_SHORT, "data.document_masking=true"),
    "recomputed": (*VARIANTS["dropout"], "model.activation_checkpointing=full"),
    "short": (*VARIANTS["plain"], *_SHORT),
    "few": (*VARIANTS["plain"], "data.source=jsonl", "data.path={folder}/few.jsonl"),
    "lora": (*_CHATS, _ADAPTER),
    "sft": _CHATS,
    "noise": (*_CHATS, "sft.neftune_alpha=5.0"),
    "dpo": (*_TUNED, "task=dpo", "data.path={folder}/pairs.jsonl", _ADAPTER),
    "moe": (
        *("model.architecture=qwen3_moe", f"model.config={_OTHER[:-1]}, {_EXPERTS}}}"),
        *("model.router_z_loss=0.001", "model.balance_loss=0.01"),
    ),
    "muon": (*VARIANTS["plain"], "optimizer.name=muon", "optimizer.learning_rate=8.0e-3"),
}
"""Variants of later defects: tasks, models, optimizers and data that detection.md has none of."""
WIDE = {name: (overrides, path, stage) for name, overrides, path, stage in drawn()}
"""Healthy set-ups over all architectures."""
WIDE_STEPS = 12
_FP32_ATTENTION = (f"precision.manifest={REPOSITORY}/lab/detection/fp32_attention.json",)
"""Manifest of GPT-2 with dropout, whose attention torch computes in FP32 on a CPU; one of BF16 alone refuses that."""
_SMALL = {"reduce_bucket_size": 65536, "allgather_bucket_size": 65536}
_SMALL_ZERO3 = {
    "reduce_bucket_size": 65536,
    "stage3_prefetch_bucket_size": 65536,
    "stage3_param_persistence_threshold": 1000,
    "sub_group_size": 65536,
}


def defect_of(name: str) -> Defect:
    """The defect of that name."""
    return next(defect for defect in (*DEFECTS, *LATER) if defect.name == name)


@dataclass(frozen=True)
class Cell:
    """One run."""

    planted: str | None
    """The defect's name."""
    path: str
    stage: int
    variant: str = "plain"
    seed: int = 0
    overrides: tuple[str, ...] = ()
    steps: int = STEPS

    @property
    def every(self) -> int:
        """[steps] Between checkpoints; as many of the first steps are recomputed by the oracle."""
        return self.steps // 3

    @property
    def points(self) -> tuple[int, ...]:
        """Attempted steps after which single steps are compared: a random one; of a healthy run at the start as well.

        Cells that share a defect share it too, since they may share a twin.
        """
        drawn = random.Random(f"{self.planted or self.variant} {self.seed}").randrange(1, self.steps - WALK + 1)
        return (drawn,) if self.planted is not None else (0, drawn)

    @property
    def is_wide(self) -> bool:
        """Whether it is one of the healthy set-ups over all architectures, which are judged as the gate judges."""
        return self.variant in WIDE

    @property
    def defect(self) -> Defect | None:
        """None of a healthy run."""
        return defect_of(self.planted) if self.planted is not None else None

    @property
    def name(self) -> str:
        """Unique."""
        what = self.planted if self.planted is not None else f"healthy {self.variant}, seed {self.seed}"
        return f"{what} | {self.path} at ZeRO-{self.stage}"


def base(folder: Path, variant: str, *, seed: int = 0, steps: int = STEPS) -> list[str]:
    """The arguments that a run and its twin share, for `read_command_line`."""
    known = VARIANTS | FURTHER_VARIANTS | {name: overrides for name, (overrides, _, _) in WIDE.items()}
    return [
        *("--config", str(REPOSITORY / "config/recipes/demo.yaml")),
        *("data.source=text", f"data.path={TEXT}", "data.tokenizer=bytes", f"data.cache_dir={folder}/cache"),
        *("data.sequence_length=64", "data.validation_fraction=0.2", "data.workers=1"),
        *("model.activation_checkpointing=none", "batch.global_size=8", "batch.micro_size=2"),
        *(f"run.steps={steps}", f"run.seed={seed}", f"run.dir={folder}/runs", "run.resume=never"),
        *(f"schedule.warmup_steps={steps // 6}", "optimizer.gradient_clipping=0.5"),
        *(f"evaluate.every_steps={steps}", "evaluate.batches=4", "generate.tokens=0"),
        *("tracking.wandb=disabled", "tracking.log_every_steps=1000", "telemetry.every_steps=0"),
        *(text.replace("{folder}", str(folder)) for text in known[variant]),
    ]


def precision(folder: Path, path: str, stage: int) -> list[str]:
    """The overrides of a precision path at a stage."""
    dtype = "fp32" if path == MANIFEST else path
    return [
        f"deepspeed.config={_document(folder, stage, dtype)}",
        f"precision.compute={dtype}",
        *(["precision.path=manifest", "precision.manifest=config/manifests/bf16.json"] if path == MANIFEST else []),
        *(["precision.loss_scale.initial=1024", "precision.loss_scale.window=4"] if path == FP16 else []),
    ]


def _document(folder: Path, stage: int, dtype: str) -> Path:
    """DeepSpeed's JSON with buckets and thresholds for a tiny model, so that it is split as a large one is."""
    path = folder / f"zero{stage}_{dtype}.json"
    if not path.exists():
        document = read_document(REPOSITORY / f"ds_configs/zero{stage}_{dtype}.json")
        document["zero_optimization"] |= _SMALL_ZERO3 if stage == 3 else _SMALL
        write_atomically(path, json.dumps(document).encode())  # by every rank
    return path


def write_documents(folder: Path) -> None:
    """Short texts of uneven lengths, for micro-batches with different numbers of labels."""
    draw = random.Random(5)
    texts = ["".join(draw.choices("abcd ", k=draw.randint(1, 60))) for _ in range(1500)]
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (folder / "few.jsonl").write_text("".join(lines[:120]), encoding="utf-8")  # several epochs of a run
    (folder / "short.jsonl").write_text("".join(lines), encoding="utf-8")


def write_rows(folder: Path) -> None:
    """Chats, pairs of answers, and a model to start from."""
    write_chats(folder / "chats.jsonl", 400)
    write_pairs(folder / "pairs.jsonl", 300)
    write_base(folder / "base", hidden_size=64, intermediate_size=128, num_attention_heads=4, num_key_value_heads=2)


def cell_of(defect: Defect, path: str, stage: int) -> Cell:
    """A run of a defect, with its model and overrides."""
    return Cell(defect.name, path, stage, defect.variant, 0, defect.overrides)


def defect_cells() -> Iterator[Cell]:
    """First each defect once, then on its second path, then on its third, each time at another stage.

    Which path and which stage comes first goes round, so that every stage sees every kind of defect.
    """
    for turn in range(len(PATHS)):
        for number, defect in enumerate(DEFECTS):
            if turn < len(defect.paths):
                path = defect.paths[(number + turn) % len(defect.paths)]
                yield cell_of(defect, path, 1 + (number // len(PATHS) + turn) % 3)


def healthy_cells() -> Iterator[Cell]:
    """40 runs without a defect; the last seed with the checks for silent corruption."""
    for seed, path, stage in product((0, 1, 2), PATHS, (1, 2, 3)):
        yield Cell(None, path, stage, "plain", seed, WATCHED if seed == 2 else ())
    places = tuple(zip(PATHS, (1, 2, 3), strict=True))
    for variant, count in (("documents", 3), ("tied", 3), ("qwen3", 2), ("gemma3", 2)):
        for path, stage in places[:count]:
            yield Cell(None, path, stage, variant, 0)
    for path, stage in places:
        yield Cell(None, path, stage, "dropout", 0, _FP32_ATTENTION if path == MANIFEST else ())


def wide_cells() -> list[Cell]:
    """The healthy set-ups over all architectures."""
    # two overflows, the hysteresis, may end each window of four good steps (`precision`)
    skips = {FP16: ("parity.skipped_share=0.34",)}
    return [
        Cell(None, path, stage, name, 0, skips.get(path, ()), steps=WIDE_STEPS)
        for name, (_, path, stage) in WIDE.items()
    ]


def later_cells() -> list[Cell]:
    """Each later defect on its paths, each time at another stage; one seed's healthy runs among them."""
    planted = [
        cell_of(defect, path, 1 + (number + turn) % 3)
        for turn in range(len(PATHS))
        for number, defect in enumerate(LATER)
        for path in defect.paths[turn : turn + 1]
    ]
    healthy = [cell for cell in healthy_cells() if cell.seed == 0]
    healthy += [
        Cell(None, path, 1 + (number + turn) % 3, variant, 0)
        for number, variant in enumerate(FURTHER_VARIANTS)
        for turn, path in enumerate((BF16, FP16))
    ]
    threes = zip_longest(planted[: len(LATER) : 2], planted[1 : len(LATER) : 2], healthy)
    return [cell for three in threes for cell in three if cell is not None] + planted[len(LATER) :]


def all_cells() -> list[Cell]:
    """All cells in the order of their runs: each defect once, with healthy runs between them, then the other paths."""
    planted, healthy = list(defect_cells()), list(healthy_cells())
    first, others = planted[: len(DEFECTS)], planted[len(DEFECTS) :]
    own = {defect.name for defect in DEFECTS if defect.group == TEAM}
    of_judge = {defect.name for defect in DEFECTS if defect.of_judge}
    first.sort(key=lambda cell: (cell.planted in own, cell.planted not in of_judge))
    threes = zip_longest(first[::2], first[1::2], healthy)
    return [cell for three in threes for cell in three if cell is not None] + others
