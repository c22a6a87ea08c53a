"""A small job of each kind of fine-tuning, on models of random weights and rows of random words."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.rows import labelled, seq2seq
from tests.support.rows.chats import write_base, write_chats, write_pairs

LORA = "adapter={kind: lora, r: 4, alpha: 8}"
_BF16, _FP16, _ZERO3 = "precision.compute=bf16", "precision.compute=fp16", "deepspeed.stage=3"
_COMMON = [
    *("model.architecture=null", "model.config={}", "model.activation_checkpointing=none"),
    *("data.source=auto", "data.tokenizer=model", "data.sequence_length=96", "data.validation_fraction=0.2"),
    *("batch={global_size: 8, micro_size: 2}", "checkpoint.every_steps=0", "evaluate={every_steps: 0, batches: 4}"),
    *("generate.tokens=0", "tracking.wandb=disabled"),
]
_DROPOUT = {
    "base": "model.config={attention_dropout: 0.1}",
    "encoder": "model.config={hidden_dropout_prob: 0.1, attention_probs_dropout_prob: 0.1}",
    "t5": "model.config={dropout_rate: 0.1}",
}


@dataclass(frozen=True)
class TaskJob:
    """A training job of two ranks."""

    task: str
    model: str
    data: str
    overrides: Sequence[str]
    module: str
    """One whose first output of a micro-batch, where it is not finite, reaches the loss."""

    @property
    def quantised(self) -> bool:
        """Whether it needs bitsandbytes."""
        return any("base: " in item for item in self.overrides)


def _adapted(**settings: str) -> str:
    return LORA[:-1] + "".join(f", {name}: {value}" for name, value in settings.items()) + "}"


_LABELLED = ("data.sequence_length=40",)
_WORDS = ("data.sequence_length=32",)
_SIDES = (f"data.sequence_length={seq2seq.SOURCE}", f"data.target_length={seq2seq.TARGET}")
_TAUGHT = ("data.format=messages", "distill.teacher={folder}/teacher")
_VALUE, _OF_BERT = "model.layers.1.self_attn.v_proj", "bert.encoder.layer.1.attention.self.value"
_LABELLER, _MASKED, _PAIRED = ("classify", "encoder"), ("mlm", "encoder", "sequence"), ("seq2seq", "t5", "sides")
_ANSWERS, _STUDENT = ("sft", "base", "chats"), ("distill", "base", "chats")
JOBS = {
    "sft": TaskJob(*_ANSWERS, [_BF16, _ZERO3], "model.layers.0.mlp.up_proj"),
    "sft, LoRA": TaskJob(*_ANSWERS, [_BF16, LORA], f"{_VALUE}.lora_B.default"),
    "sft, NF4": TaskJob(*_ANSWERS, [_BF16, _adapted(base="nf4")], f"{_VALUE}.base_layer"),
    "sft, int8": TaskJob(*_ANSWERS, [_FP16, _ZERO3, _adapted(base="int8")], f"{_VALUE}.lora_A.default"),
    "dpo": TaskJob("dpo", "base", "pairs", [_FP16, "deepspeed.stage=1"], _VALUE),
    "dpo, LoRA": TaskJob("dpo", "base", "pairs", [_BF16, LORA], "model.layers.0.mlp.down_proj.lora_B.default"),
    "distill": TaskJob(*_STUDENT, [_BF16, *_TAUGHT], "model.layers.0.mlp.down_proj"),
    "distill, LoRA": TaskJob(*_STUDENT, [_BF16, _ZERO3, LORA, *_TAUGHT], f"{_VALUE}.lora_A.default"),
    "classify": TaskJob(*_LABELLER, "sequence", [_BF16, *_LABELLED], "bert.pooler.dense"),
    "classify, token": TaskJob(*_LABELLER, "token", [_FP16, "classify.kind=token", *_LABELLED], _OF_BERT),
    "classify, regression": TaskJob(
        *_LABELLER, "regression", [_BF16, _ZERO3, "classify.kind=regression", *_LABELLED], "classifier"
    ),
    "classify, LoRA": TaskJob(*_LABELLER, "sequence", [_BF16, LORA, *_LABELLED], f"{_OF_BERT}.lora_B.default"),
    "mlm": TaskJob(*_MASKED, [_BF16, *_WORDS], "bert.encoder.layer.0.output.dense"),
    "mlm, LoRA": TaskJob(
        *_MASKED, [_FP16, _ZERO3, _adapted(modules_to_save="[cls]"), *_WORDS], f"{_OF_BERT}.lora_A.default"
    ),
    "seq2seq": TaskJob(*_PAIRED, [_BF16, _ZERO3, *_SIDES], "decoder.block.1.layer.1.EncDecAttention.v"),
    "seq2seq, LoRA": TaskJob(
        *_PAIRED, [_BF16, LORA, *_SIDES], "encoder.block.0.layer.0.SelfAttention.v.lora_B.default"
    ),
}


def write_all(folder: Path) -> Path:
    """The models and the rows of all of them."""
    write_base(folder / "base")
    write_base(folder / "teacher", seed=1)
    labelled.write_encoder(folder / "encoder")
    seq2seq.write_model(folder / "t5")
    write_chats(folder / "chats.jsonl", 80)
    write_pairs(folder / "pairs.jsonl", 60)
    for kind in ("sequence", "token", "regression"):
        labelled.write_rows(folder / f"{kind}.jsonl", kind, 80)
    seq2seq.write_rows(folder / "sides.jsonl", 80)
    return folder


def overrides_of(folder: Path, name: str, *, dropout: bool = False) -> list[str]:
    """Overrides that turn the demo's config into the job of that name. folder: one that `write_all` has filled."""
    job = JOBS[name]
    found = [*_COMMON, f"task={job.task}", f"model.name_or_path={folder}/{job.model}"]
    found += [f"data.path={folder}/{job.data}.jsonl", f"data.cache_dir={folder}/cache"]
    found += [item.replace("{folder}", str(folder)) for item in job.overrides]
    return [*found, _DROPOUT[job.model]] if dropout else found
