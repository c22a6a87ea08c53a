"""The runs that take a step on the fake device."""

from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from tests.support.jobs import task_jobs
from tests.training.tasks.mlm_cases import write_text

_MODEL = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, num_key_value_heads: 2"
_COMMON = (
    *("run.resume=never", "run.steps=100", "generate.tokens=0", "telemetry.every_steps=2", "guard.spike_sigmas=6"),
    *("tracking.wandb=disabled", "data.source=auto", "data.tokenizer=bytes", "data.sequence_length=64"),
    "evaluate={every_steps: 100, batches: 1}",
)
_PRETRAINED = {
    "ZeRO-0 fp32": ("adamw", 2, ()),
    "ZeRO-1 bf16": ("adamw", 1, ()),
    "ZeRO-2 bf16": ("muon", 2, ("data.document_masking=true",)),
    "ZeRO-2 fp16": ("adamw", 8, ("model.activation_checkpointing=full",)),
    "ZeRO-3 bf16": ("adamw", 8, ("model.activation_checkpointing=full",)),
    "ZeRO-3 fp16": ("stable_adamw", 1, ("model.loss=chunked",)),
}
_BERT = f"{_MODEL.partition(', num_key')[0]}, max_position_embeddings: 64"
_TASKS = {
    "sft": f"llama model.config={{{_MODEL}}}",
    "dpo": f"llama model.config={{{_MODEL}}}",
    "classify": f"bert model.config={{{_BERT}}}",
    "mlm": f"bert model.config={{{_BERT}}}",
}
"""Jobs of `task_jobs` to the model that is drawn in place of the one in files: a file has values, a fake has none."""
NAMES = (*_PRETRAINED, *_TASKS)
QUICK = ("ZeRO-2 bf16", "ZeRO-3 bf16")
"""Cases that every run of the tests takes; the rest is slow."""
_EXTRAS = ("evaluate", "attribute", "discard", "checksums", "momentum")


def cases(folder: Path) -> dict[str, Any]:
    """Name to arguments, ranks and what else is done, for `run.take_steps`. folder: gets the data and models."""
    task_jobs.write_all(folder)
    write_text(folder / "text", 60)
    found = {}
    for name, (optimizer, ranks, overrides) in _PRETRAINED.items():
        stage, kind = name.removeprefix("ZeRO-").split()
        shape, chosen = f"model.config={{{_MODEL}}}", [f"precision.compute={kind}"]
        given = [*_COMMON, shape, f"deepspeed.stage={stage}", *chosen, f"optimizer.name={optimizer}"]
        given.append(f"batch={{global_size: {4 * ranks}, micro_size: 2}}")
        given += [f"data.path={folder}/text", f"data.cache_dir={folder}/cache", *overrides]
        extras = _EXTRAS if kind == "bf16" else ()
        found[name] = {"arguments": given, "ranks": ranks, "extras": extras}
    for name, model in _TASKS.items():
        given = [*task_jobs.overrides_of(folder, name), "run.resume=never", "run.steps=100", "telemetry.every_steps=2"]
        tokenizer = f"data.tokenizer={folder}/{task_jobs.JOBS[name].model}"
        given += [tokenizer, "model.name_or_path=null", *f"model.architecture={model}".split(" ", 1)]
        found[name] = {"arguments": given, "ranks": 2, "extras": ("evaluate",)}
    for number, case in enumerate(found.values()):
        own = [f"run.dir={folder}/runs", f"run.name=case-{number}"]
        case["arguments"] = ["--config", f"{REPOSITORY}/config/recipes/demo.yaml", *case["arguments"], *own]
    return found
