"""Every known defect is found in a config that has it, and not in one beside it."""

import re
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.deepspeed.combinations import Combination, combinations
from tools.audit.configs import BAD, SEVERITIES, Given, find, read_given, read_known, sound

BASE = {
    "train_micro_batch_size_per_gpu": 1,
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "zero_optimization.stage": 2,
    "bf16.enabled": True,
    "data_types.grad_accum_dtype": "fp32",
}
NOW = {"deepspeed": "0.19.8", "transformers": "5.23.0", "accelerate": "1.15.0"}
FP16 = {"bf16.enabled": False, "fp16.enabled": True}
FP32 = {"bf16.enabled": False}
STAGE = "zero_optimization.stage"
HF, SEQUENCE = {"+trainer": "hf"}, {"sequence_parallel_size": 2}
AUTOCAST = {**FP32, "torch_autocast.enabled": True, "torch_autocast.dtype": "float16"}
OFFLOAD = {"zero_optimization.offload_optimizer.device": "cpu"}
MUON = {"optimizer.type": "Muon"}
PIPE = {"pipeline.stages": 2}
ONCE = {"gradient_accumulation_steps": 1}


def given_of(changes: dict[str, Any]) -> Given:
    """A run by its differences from BASE."""
    document: dict[str, Any] = {}
    for key, value in (BASE | {k: v for k, v in changes.items() if k[0] != "+" and k not in NOW}).items():
        if value is None:
            continue
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    versions = [f"{name}={changes.get(name, version)}" for name, version in NOW.items()]
    decided = {"trainer": "own"} | {key[1:]: value for key, value in changes.items() if key[0] == "+"}
    return read_given([], ("ds.json", document), decided, versions)


HITS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "zero2-keeps-last-micro-batch": ({"deepspeed": "0.18.2"}, {"deepspeed": "0.18.3"}),
    "zero1-bf16-fp32-sums-leak": ({STAGE: 1, "deepspeed": "0.18.9"}, {"data_types.grad_accum_dtype": "bf16"}),
    "zero1-bf16-fp32-sums-offload": (OFFLOAD | {STAGE: 1, "deepspeed": "0.19.3"}, ONCE),
    "submodule-used-twice": ({"deepspeed": "0.19.3", "+submodule_used_twice": True}, {"deepspeed": "0.19.8"}),
    "zero0-bf16-divides-by-a-scale": ({STAGE: 0, "deepspeed": "0.18.3"}, {"deepspeed": "0.18.6"}),
    "trainer-divides-twice": (HF | {"deepspeed": "0.18.3"}, ONCE),
    "zero2-offload-drops-micro-batches": (OFFLOAD | {"deepspeed": "0.18.2"}, ONCE),
    "hf-deepspeed-divides-twice": (HF | {"transformers": "4.48.3"}, {"transformers": "4.49.0"}),
    "hf-mean-of-means": (HF | {"transformers": "4.45.2"}, ONCE),
    "fp16-zero0-loss-not-scaled": (FP16 | {STAGE: 0}, {STAGE: 1}),
    "bf16-zero0-first-step-at-start": ({STAGE: 0}, {STAGE: 1}),
    "muon-zero2-drops-gradients": (MUON, {"data_types.grad_accum_dtype": "bf16"}),
    "muon-clips-what-it-orthogonalized": (MUON | {STAGE: 3}, {"gradient_clipping": 0}),
    "muon-zero1-clips-what-it-orthogonalized": (MUON | FP32 | {STAGE: 1}, {"bf16.enabled": True}),
    "layerwise-optimizer-on-flat-shard": ({"+optimizer": "adafactor"}, {STAGE: 0}),
    "torchao-8bit-rows-run-away": (FP32 | {STAGE: 0, "+optimizer": "adamw_torch_8bit"}, {"+optimizer": "adamw_torch"}),
    "bf16-masters-stand-still": (
        {"bf16.bf16_master_weights_and_grads": True},
        {"bf16.bf16_master_weights_and_grads": False},
    ),
    "autocast-fp16-clips-scaled-norm": (AUTOCAST, {"gradient_clipping": 0}),
    "autocast-fp16-never-backs-off": (AUTOCAST, {"torch_autocast.dtype": "bfloat16"}),
    "autocast-fp16-skips-told-as-applied": (AUTOCAST | {STAGE: 0}, {STAGE: 1}),
    "fp16-growth-halves-update": (FP16 | {"gradient_clipping": 0}, {"fp16.loss_scale": 1024}),
    "fp16-offload-keeps-skipped-gradients": (FP16 | OFFLOAD, {STAGE: 3}),
    "bf16-offload-keeps-skipped-gradients": (OFFLOAD, {STAGE: 3}),
    "ulysses-zero012-gathered-loss": (SEQUENCE | HF, {STAGE: 3}),
    "ulysses-zero3-own-loss": (SEQUENCE | {STAGE: 3}, HF),
    "ulysses-drops-mask": (SEQUENCE | {"+attention": "sdpa"}, {"+attention": "flash_attention_2"}),
    "ulysses-bf16-zero1-stops": (SEQUENCE | {STAGE: 1}, {STAGE: 3}),
    "autotp-dropout-parts-replicas": ({"tensor_parallel.autotp_size": 2, "+dropout": True}, {"+dropout": False}),
    "pipeline-tied-fp16": (
        PIPE | FP16 | {STAGE: 1, "+tied_pipeline_layer": True},
        FP16 | {"bf16.enabled": True, "fp16.enabled": False},
    ),
    "pipeline-tied-fp32-norm": (PIPE | FP32 | {STAGE: 0, "+tied_pipeline_layer": True}, {STAGE: 1}),
    "pipeline-scales-each-stage": (PIPE | {STAGE: 1, "deepspeed": "0.19.2"}, ONCE),
    "moe-zero0-clips-by-mean-norm": (FP32 | {STAGE: 0, "expert_parallel.autoep_size": 2}, {STAGE: 1}),
    "autoep-transformers-5": ({"expert_parallel.autoep_size": 2}, {"expert_parallel.autoep_size": 1}),
    "tiled-mlp-sums-in-bf16": ({"+tiled_mlp": True}, FP32),
    "prescale-stops": ({"prescale_gradients": True}, {STAGE: 1}),
    "predivide-stops": ({"gradient_predivide_factor": 2.0}, {"gradient_predivide_factor": 1.0}),
    "accelerate-cpu-drops-deepspeed": (HF | {"+use_cpu": True}, {"+use_cpu": False}),
    "clipping-ignored": (
        HF | {"gradient_clipping": None, "+clipping": 0.3},
        {"gradient_clipping": "auto"},
    ),
    "overlap-comm-buffers": ({"zero_optimization.overlap_comm": True, "deepspeed": "0.18.9"}, {"deepspeed": "0.19.0"}),
    "overlap-comm-compile": (
        {"zero_optimization.overlap_comm": True, "deepspeed": "0.19.2", "+compile": True},
        {"+compile": False},
    ),
    "multi-rank-bucket-norm": (
        {"deepspeed": "0.13.1"},
        {"zero_optimization.use_multi_rank_bucket_allreduce": False},
    ),
    "bf16-overflow-applied": ({"deepspeed": "0.19.2"}, {"bf16.check_grad_overflow": True}),
    "fp32-zero0-not-guarded": (FP32 | {STAGE: 0}, {STAGE: 1}),
    "fp32-not-guarded": (FP32 | {"deepspeed": "0.19.3"}, {"deepspeed": "0.19.8"}),
    "zero3-fp32-now-and-then": (FP32 | {STAGE: 3, "deepspeed": "0.19.3"}, {"deepspeed": "0.19.8"}),
    "round-robin-reads-wrong-masters": ({"zero_optimization.round_robin_gradients": True}, {STAGE: 3}),
    "fp16-range": (FP16 | {"+model_type": "t5"}, {"+model_type": "llama"}),
    "dpo-reference-rounded": ({"+precomputed_reference": True}, FP32),
    "accelerate-scheduler-steps-per-process": ({"+trainer": "accelerate", "+ranks": 2}, {"+ranks": 1}),
    "labels-counted-before-the-shift": (HF | {"transformers": "4.53.3"}, {"transformers": "4.45.2"}),
    "hf-routers-loss-in-each-micro-batch": (HF | {"+router_loss": True}, ONCE),
    "tokens-not-averaged-across-devices": (HF | {"transformers": "4.53.3"}, {"transformers": "4.54.0"}),
    "sums-in-16-bits": ({"data_types.grad_accum_dtype": None}, {"data_types.grad_accum_dtype": "fp32"}),
    "many-sums-in-16-bits": (
        {"data_types.grad_accum_dtype": None, "gradient_accumulation_steps": 32},
        {"gradient_accumulation_steps": 31},
    ),
    "moments-of-first-group-alone": ({}, {STAGE: 3}),
    "masters-start-rounded": ({}, FP32),
    "zero2-ignores-fp32-sums": ({"deepspeed": "0.19.3"}, {"data_types.grad_accum_dtype": None}),
    "bf16-skips-silently": ({}, {STAGE: 0}),
    "fp16-zero3-norm-halved": (FP16 | {STAGE: 3}, {STAGE: 2}),
    "fp16-scale-starts-high": (FP16 | {"fp16.initial_scale_power": 32}, {"fp16.initial_scale_power": 16}),
    "fp16-smallest-scale-raises": (FP16, {"fp16.loss_scale": 1024}),
    "zero2-divides-before-fp32": (
        FP16 | {"communication_data_type": "fp32"},
        {"zero_optimization.reduce_scatter": False},
    ),
    "checkpoint-replaces-config": ({"+resumed_with_another_config": True}, {STAGE: 3}),
    "auto-that-nobody-fills": (
        {"+trainer": "hf", "communication_data_type": "auto"},
        {"communication_data_type": None},
    ),
}
"""Defect to what differs from BASE where it is hit, and what differs from that where it is not. Keys of the JSON are
dotted; a version has a name of NOW, what a trainer decides opens with `+`."""
ENTRIES = {entry["id"]: entry for entry in read_known()}


def test_every_entry_has_its_two_configs() -> None:
    assert len(ENTRIES) == len(read_known())
    assert ENTRIES.keys() == HITS.keys()


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_is_found_in_its_config_and_not_in_the_one_beside_it(name: str) -> None:
    hit, near = HITS[name]
    found = find(ENTRIES[name], given_of(hit))
    assert found is not None and found["why"] == ""
    assert find(ENTRIES[name], given_of(hit | near)) is None


@pytest.mark.parametrize("name", ENTRIES)
def test_an_entry_says_where_it_is_from(name: str) -> None:
    entry = ENTRIES[name]
    assert entry["severity"] in SEVERITIES
    assert entry["measured"] or entry["thread"].startswith("https://github.com/")
    assert entry.get("instead") or entry["severity"] == "note"
    scripts = re.findall(r"[\w/]+\.py", (entry["measured"] or {}).get("command", ""))
    folder = REPOSITORY / "docs/upstream"
    assert all((REPOSITORY / script).exists() or (folder / script).exists() for script in scripts)


@pytest.mark.parametrize("script", sorted((REPOSITORY / "docs/upstream").glob("*.py")), ids=lambda path: path.stem)
def test_every_measured_defect_of_deepspeed_is_an_entry(script: Path) -> None:
    """Defects that no other trainer's config can name are the exception."""
    text = (REPOSITORY / "tools/audit/known.yaml").read_text(encoding="utf-8")
    assert (script.name in text) != (script.name in ("fp8_cast_hides_inf.py", "fp8_tensorwise_depends_on_cut.py"))


CELLS = re.findall(
    r"^\| ((?:FP32|BF16|FP16), ZeRO-[^|]*) \| (on|off) \| (\d) \|.* (\S+) \| (\S+) \| (\S+) \|$",
    (REPOSITORY / "docs/precision-matrix.md").read_text(encoding="utf-8"),
    re.MULTILINE,
)
NAMES = {str(one): one for one in combinations() if one.path == "cast"}


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: " ".join(cell[:3]))
def test_a_verdict_is_that_of_the_matrix(cell: tuple[str, ...]) -> None:
    """Nothing is blamed where bare DeepSpeed was measured right, and something is where its masters are off."""
    name, clipping, accumulation, *_, norm, masters = cell
    combination: Combination = NAMES[name]
    dtypes = {one: {"enabled": True} for one in (combination.compute,) if one != "fp32"}
    zero: dict[str, Any] = {"stage": combination.stage}
    zero |= {f"offload_{what}": {"device": "cpu"} for what in combination.offload.split("+") if what != "none"}
    sums = (
        {}
        if combination.stage == 0
        else {"communication_data_type": "fp32", "data_types": {"grad_accum_dtype": "fp32"}}
    )
    document = {"zero_optimization": zero, "gradient_clipping": 0.4 if clipping == "on" else 0} | dtypes | sums
    document["gradient_accumulation_steps"] = int(accumulation)
    given = read_given([], ("ds.json", document), {}, [f"{name}={version}" for name, version in NOW.items()])
    found = [one for entry in ENTRIES.values() if (one := find(entry, given)) is not None]
    overflows = {"fp16-offload-keeps-skipped-gradients"}  # the matrix has no overflow
    bad = [one["id"] for one in found if one["severity"] in BAD and one["id"] not in overflows]
    wrong = "*" in norm + masters
    assert bool(bad) == (float(masters.strip("*")) > 0.065 and wrong)
    assert bool(found) or not wrong
    assert bool(list(sound(given))) == (not wrong)


def test_what_is_not_known_is_possible_and_not_found() -> None:
    entry = ENTRIES["fp16-growth-halves-update"]
    found = find(entry, given_of({**FP16, "gradient_clipping": "auto", "+trainer": "hf"}))
    assert found is not None and found["why"] == "if clipping is 0"


def test_a_release_that_was_not_tried_is_possible_and_not_found() -> None:
    found = find(ENTRIES["fp16-zero0-loss-not-scaled"], given_of(FP16 | {STAGE: 0, "deepspeed": "0.25.0"}))
    assert found is not None and "not with 0.25.0" in found["why"]
