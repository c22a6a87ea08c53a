"""The runs that take a step on the fake device: each pair of what may be wrong together is in one of them."""

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
_CAST = {
    "ZeRO-0 fp32": ("adamw", 2, ()),
    "ZeRO-1 fp32": ("sgd", 2, ("model.activation_checkpointing=selective",)),
    "ZeRO-1 bf16": ("adamw", 1, ()),
    "ZeRO-1 fp16": ("lamb", 2, ("guard.max_update_ratio=10",)),
    "ZeRO-2 fp32": ("lion", 1, ("model.loss=chunked",)),
    "ZeRO-2 bf16": ("muon", 2, ("data.document_masking=true",)),
    "ZeRO-2 fp16": ("adamw", 8, ("model.activation_checkpointing=full",)),
    "ZeRO-3 fp32": ("muon", 2, ("data.document_masking=true",)),
    "ZeRO-3 bf16": ("adamw", 8, ("model.activation_checkpointing=full",)),
    "ZeRO-3 fp16": ("stable_adamw", 1, ("model.loss=chunked",)),
}
_MANIFESTS = {
    "ZeRO-0 bf16.json": ("adamw", 1, ()),
    "ZeRO-1 fp8.json": ("adamw", 1, ("model.activation_checkpointing=attention",)),
    "ZeRO-2 llama_mixed.json": ("adamw", 2, ("telemetry.probe=true",)),
    "ZeRO-3 bf16.json": ("sgd", 2, ("data.document_masking=true",)),
    "ZeRO-3 fp8.json": ("muon", 1, ("model.activation_checkpointing=full",)),
}
_FURTHER = {
    "ZeRO-1 bf16, split masters": ("adamw", 2, ("precision.masters=split",)),
    "ZeRO-2 bf16, offload": ("adamw", 2, ("deepspeed.offload=cpu",)),
    "ZeRO-2 bf16, checks": (
        *("adamw", 2),
        ("guard={replica_checks: 1, update_checks: 8, reexecute: every 2, gradient_checks: 1}", "telemetry.probe=true"),
    ),
    "ZeRO-1 fp32, sequence": ("adamw", 2, ("parallel.sequence=2",)),
    "ZeRO-1 bf16, tensor": ("adamw", 2, ("parallel.tensor=2", "telemetry.every_steps=0")),
    "ZeRO-2 bf16, experts": (
        *("adamw", 2),
        ("parallel.expert=2", "model.architecture=mixtral", "telemetry.every_steps=0", "model.balance_loss=0.01"),
    ),
}
_SIZES = (8, 64, 1024)
_COLLECTIVES = {
    f"ZeRO-{stage} bf16, {ranks} ranks": ("adamw", ranks, (f"batch={{global_size: {ranks}, micro_size: 1}}",))
    for stage in (1, 2, 3)
    for ranks in _SIZES
}
"""Whose collectives are in a table of docs/performance.md."""
_PRETRAINED = {**_CAST, **_MANIFESTS, **_FURTHER, **_COLLECTIVES}
_BERT = f"{_MODEL.partition(', num_key')[0]}, max_position_embeddings: 64"
_T5 = "d_model: 32, d_kv: 16, d_ff: 48, num_layers: 2, num_heads: 2"
_TASKS = {
    "sft": f"llama model.config={{{_MODEL}}}",
    "dpo": f"llama model.config={{{_MODEL}}}",
    "classify": f"bert model.config={{{_BERT}}}",
    "classify, token": f"bert model.config={{{_BERT}}}",
    "mlm": f"bert model.config={{{_BERT}}}",
    "seq2seq": f"t5 model.config={{{_T5}}}",
}
"""Jobs of `task_jobs` to the model that is drawn in place of the one in files: a file has values, a fake has none."""
NAMES = (*_PRETRAINED, *_TASKS)
QUICK = ("ZeRO-0 fp32", "ZeRO-1 bf16", "ZeRO-2 bf16", "ZeRO-2 fp16")
"""Those that every run of the tests takes; the rest is slow."""
_EXTRAS = ("evaluate", "attribute", "discard", "checksums", "momentum")


def cases(folder: Path) -> dict[str, Any]:
    """Name to arguments, ranks and what else is done, for `run.take_steps`. folder: gets the data and models."""
    task_jobs.write_all(folder)
    write_text(folder / "text", 60)
    found = {}
    for name, (optimizer, ranks, overrides) in _PRETRAINED.items():
        stage, kind = name.split(",")[0].removeprefix("ZeRO-").split()
        chosen = [f"precision.compute={kind}"]
        if kind.endswith(".json"):
            chosen = [
                "precision.compute=fp32",
                "precision.path=manifest",
                f"precision.manifest={REPOSITORY}/config/manifests/{kind}",
            ]
        shape = f"model.config={{{_MODEL}{', num_local_experts: 4' * ('experts' in name)}}}"
        given = [*_COMMON, shape, f"deepspeed.stage={stage}", *chosen, f"optimizer.name={optimizer}"]
        given.append(f"batch={{global_size: {4 * ranks}, micro_size: 2}}")
        given += [f"data.path={folder}/text", f"data.cache_dir={folder}/cache", *overrides]
        found[name] = {
            "arguments": given,
            "ranks": ranks,
            "extras": _EXTRAS if kind == "bf16" and name in _CAST else (),
        }
    for name, model in _TASKS.items():
        given = [*task_jobs.overrides_of(folder, name), "run.resume=never", "run.steps=100", "telemetry.every_steps=2"]
        tokenizer = f"data.tokenizer={folder}/{task_jobs.JOBS[name].model}"
        given += [tokenizer, "model.name_or_path=null", *f"model.architecture={model}".split(" ", 1)]
        found[name] = {"arguments": given, "ranks": 2, "extras": ("evaluate",)}
    for number, case in enumerate(found.values()):
        own = [f"run.dir={folder}/runs", f"run.name=case-{number}"]
        case["arguments"] = ["--config", f"{REPOSITORY}/config/recipes/demo.yaml", *case["arguments"], *own]
    return found
