"""The runs that take a step on the fake device."""

from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from precision.dtypes import DTYPES
from tests.support.jobs import task_jobs
from tests.support.models.small_run import changed_json
from tests.training.tasks.mlm_cases import write_text

_SHAPE = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2"
_LLAMA = f"{_SHAPE}, num_key_value_heads: 2"
_COMMON = (
    *("run.resume=never", "run.steps=100", "generate.tokens=0", "telemetry.every_steps=3", "guard.spike_sigmas=6"),
    *("tracking.wandb=disabled", "data.source=auto", "data.tokenizer=bytes", "data.sequence_length=64"),
    *("evaluate={every_steps: 100, batches: 1}", "model.activation_checkpointing=none"),
)
_MIXTRAL = ("model.architecture=mixtral", f"model.config={{{_LLAMA}, num_local_experts: 4}}")
_NO_AVERAGES = ("telemetry.every_steps=0",)
"""For SGD: telemetry tells by the values of sums that there are no averages."""
_RECOMPUTES = "model.activation_checkpointing"
_PRETRAINED: dict[str, tuple[int, str, tuple[str, ...]]] = {
    "ZeRO-0 fp32": (2, "adamw", ()),
    "ZeRO-0 bf16.json": (2, "adamw", ()),
    "ZeRO-1 bf16": (1, "adamw", ()),
    "ZeRO-1 bf16, momentum": (2, "sgd", _NO_AVERAGES),
    "ZeRO-1 bf16, expert": (4, "adamw", (*_MIXTRAL, "parallel.expert=2")),
    "ZeRO-1 fp32": (2, "lion", ()),
    "ZeRO-1 fp16": (8, "lamb", ("model.attention=eager",)),
    "ZeRO-1 fp8.json": (1, "adamw", (f"{_RECOMPUTES}=full",)),
    "ZeRO-1 bf16, split masters": (2, "adamw", ("precision.masters=split",)),
    "ZeRO-1 bf16, sequence": (4, "adamw", ("parallel.sequence=2",)),
    "ZeRO-1 bf16, tensor": (4, "adamw", ("parallel.tensor=2",)),
    "ZeRO-1 bf16, recomputing attention": (2, "stable_adamw", (f"{_RECOMPUTES}=attention",)),
    "ZeRO-1 fp16, offload": (2, "adamw", ("deepspeed.offload=cpu",)),
    "ZeRO-2 bf16, offload": (2, "muon", ("deepspeed.offload=cpu",)),
    "ZeRO-3 bf16, offload": (2, "adamw", ("deepspeed.offload=cpu",)),
    "ZeRO-2 bf16": (2, "muon", ("data.document_masking=true",)),
    "ZeRO-2 fp32": (2, "sgd", _NO_AVERAGES),
    "ZeRO-2 fp16": (8, "adamw", ()),
    "ZeRO-2 bf16.json": (2, "adamw", (f"{_RECOMPUTES}=full",)),
    "ZeRO-2 llama_mixed.json": (2, "lamb", ()),
    "ZeRO-2 bf16, recomputing ops": (2, "stable_adamw", (f"{_RECOMPUTES}=ops",)),
    "ZeRO-2 bf16, tensor": (4, "adamw", ("parallel.tensor=2",)),
    "ZeRO-2 bf16, split masters": (2, "adamw", ("precision.masters=split",)),
    "ZeRO-2 bf16, recomputing selective": (2, "adamw", (f"{_RECOMPUTES}=selective",)),
    "ZeRO-2 bf16, expert": (4, "adamw", (*_MIXTRAL, "parallel.expert=2")),
    "ZeRO-3 bf16": (8, "adamw", (f"{_RECOMPUTES}=full",)),
    "ZeRO-3 bf16, gathering": (8, "adamw", ()),
    "ZeRO-3 fp32, gathering": (1, "sgd", _NO_AVERAGES),
    "ZeRO-3 bf16, expert": (4, "adamw", (*_MIXTRAL, "parallel.expert=2")),
    "ZeRO-3 fp8.json": (2, "adamw", (f"{_RECOMPUTES}=ops",)),
    "ZeRO-3 fp32": (2, "stable_adamw", ()),
    "ZeRO-3 fp16": (1, "lion", ("model.loss=chunked", "data.document_masking=true")),
    "ZeRO-3 bf16, sequence": (4, "adamw", ("parallel.sequence=2",)),
    "ZeRO-3 bf16, mixtral": (2, "adamw", _MIXTRAL),
    "ZeRO-3 bf16, reentrant": (2, "adamw", (f"{_RECOMPUTES}=full", "model.checkpointing_reentrant=true")),
    "ZeRO-3 bf16, recomputing ops": (2, "muon", (f"{_RECOMPUTES}=ops",)),
    "ZeRO-3 bf16, recomputing budget": (2, "adamw", (f"{_RECOMPUTES}=budget", "model.activation_memory_gib=1")),
    "ZeRO-3 bf16, split masters": (2, "adamw", ("precision.masters=split",)),
}
"""Stage, and dtype or manifest, to ranks, optimizer and what else differs from a small Llama's usual run."""
_GATHERS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 20_000,
    "stage3_prefetch_bucket_size": 20_000,
}
"""Thresholds small enough for a small model's parameters to be gathered and released as a large one's are."""
BARE = ("ZeRO-0 fp32", "ZeRO-1 bf16", "ZeRO-3 bf16")
"""Cases that also take steps in DeepSpeed's own loop; FP16's would be skipped, since an answer of 1 is an overflow."""
_TASKS = (
    *("sft, LoRA", "dpo", "distill", "distill, LoRA"),
    *("classify", "classify, token", "classify, regression", "mlm", "seq2seq", "seq2seq, LoRA"),
)
NAMES = (*_PRETRAINED, *_TASKS)
SCALED = {f"ZeRO-{stage}, {ranks:,} ranks": (stage, ranks) for stage in range(4) for ranks in (8, 64, 1024)}
"""Cases of four blocks of Llama-3.2-1B on many ranks, whose collectives are counted."""
QUICK = ("ZeRO-2 bf16", "ZeRO-3 bf16", "ZeRO-3 fp8.json")
"""Cases that every run of the tests takes; the rest is slow."""
_EXTRAS = ("evaluate", "attribute", "discard", "checksums", "momentum")


def cases(folder: Path) -> dict[str, Any]:
    """Name to arguments, ranks and what else is done, for `run.take_steps`. folder: gets the data and models."""
    task_jobs.write_all(folder)
    if not (folder / "text").exists():
        write_text(folder / "text", 60)
    found = {}
    for name, (ranks, optimizer, overrides) in _PRETRAINED.items():
        stage, kind = name.partition(",")[0].removeprefix("ZeRO-").split()[:2]
        chosen = f"compute={kind}" if kind in DTYPES else f"manifest={REPOSITORY}/config/manifests/{kind}"
        given = [*_COMMON, f"model.config={{{_LLAMA}}}", f"deepspeed.stage={stage}", f"precision.{chosen}"]
        given.append(f"batch={{global_size: {4 * ranks}, micro_size: 2}}")
        given += [f"data.path={folder}/text", f"data.cache_dir={folder}/cache", f"optimizer.name={optimizer}"]
        given += overrides
        if name.endswith("gathering"):
            given.append(changed_json(folder, f"zero{stage}_{kind}", **_GATHERS))
        extras = _EXTRAS if name.endswith(" bf16") else ()
        found[name] = {"arguments": given, "ranks": ranks, "extras": extras, "bare": name in BARE}
    for name in _TASKS:
        given = [*task_jobs.overrides_of(folder, name), "run.resume=never", "run.steps=100", "telemetry.every_steps=3"]
        found[name] = {"arguments": given, "ranks": 2, "extras": ("evaluate",)}
    for name, (stage, ranks) in SCALED.items():
        given = ["run.resume=never", "tracking.wandb=disabled", "data.source=auto", "data.tokenizer=bytes"]
        given += [f"data.path={folder}/text", f"data.cache_dir={folder}/cache", "data.sequence_length=64"]
        given += ["model.config.num_hidden_layers=4", "model.config.vocab_size=32768", "guard.self_check_every=0"]
        given += [f"batch={{global_size: {2 * ranks}, micro_size: 1}}", f"deepspeed.stage={stage}"]
        given += [f"precision.compute={'bf16' if stage else 'fp32'}"]
        found[name] = {"arguments": given, "ranks": ranks, "extras": (), "recipe": "benchmark_1b"}
    for number, case in enumerate(found.values()):
        own = [f"run.dir={folder}/runs", f"run.name=case-{number}"]
        recipe = f"{REPOSITORY}/config/recipes/{case.pop('recipe', 'demo')}.yaml"
        case["arguments"] = ["--config", recipe, *case["arguments"], *own]
    return found
