"""The architectures that docs/models.md has a table of: each is trained, resumed, exported and loaded by transformers.

python -m tests.support.models.architectures     # runs all and writes the table
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from config.cli import REPOSITORY
from launch.job import error_line
from tests.support.jobs.launches import SMALL, events, start
from tools.export_hf.command import main as export
from training.checkpoint.partitions import open_saved_model

TABLE = REPOSITORY / "docs/models.md"
STEPS, BROKEN = 6, 3
_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
_GROUPED = {**_SIZES, "num_attention_heads": 4, "num_key_value_heads": 2}
_HEADS = {**_GROUPED, "head_dim": 16}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}


@dataclass(frozen=True)
class Case:
    """One architecture, small."""

    architecture: str
    name: str
    """As its authors write it."""
    config: dict[str, Any] = field(default_factory=lambda: dict(_GROUPED))
    refusal: str = ""
    """The error that training refuses it with; empty: it trains."""


CASES = (
    Case("gpt2", "GPT-2", {"n_embd": 32, "n_layer": 2, "n_head": 2}),
    Case("gpt_neox", "GPT-NeoX, Pythia", _SIZES),
    Case(
        "opt",
        "OPT",
        {"hidden_size": 32, "ffn_dim": 48, "word_embed_proj_dim": 32, "num_hidden_layers": 2}
        | {"num_attention_heads": 2},
    ),
    Case("bloom", "Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    Case("falcon", "Falcon", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}),
    Case("starcoder2", "StarCoder 2"),
    Case("llama", "Llama"),
    Case("mistral", "Mistral"),
    Case("mixtral", "Mixtral", {**_GROUPED, "num_local_experts": 4}),
    Case("gemma", "Gemma", _HEADS),
    Case("gemma2", "Gemma 2", _HEADS),
    Case("gemma3_text", "Gemma 3", _HEADS),
    Case("phi3", "Phi-3"),
    Case("qwen2", "Qwen2"),
    Case("qwen3", "Qwen3", _HEADS),
    Case("qwen3_moe", "Qwen3 MoE", {**_HEADS, **_EXPERTS, "num_experts": 4}),
    Case(
        "qwen3_next",
        "Qwen3-Next",
        {**_HEADS, **_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24, "linear_num_key_heads": 2}
        | {"linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
        | {"layer_types": ["linear_attention", "full_attention"]},
    ),
    Case("olmo2", "OLMo 2"),
    Case("granite", "Granite"),
    Case("cohere", "Cohere Command R"),
    Case("smollm3", "SmolLM 3"),
    Case(
        "deepseek_v3",
        "DeepSeek V3",
        {**_SIZES, **_EXPERTS, "num_key_value_heads": 2, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2}
        | {"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8}
        | {"qk_nope_head_dim": 8, "v_head_dim": 16},
    ),
    Case("gpt_oss", "gpt-oss", {**_HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    Case("mamba", "Mamba", {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2}),
)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    stage: int
    attention: str = ""
    refusal: str = ""
    """The line that training was refused with."""
    problems: tuple[str, ...] = ()
    """Properties that did not hold."""


def run_case(case: Case, folder: Path, *, stage: int) -> Outcome:
    """Train in BF16 on two processes, resume from the middle, export in FP32, load with transformers."""
    output, code = _train(folder, "whole", case, stage)
    if code != 0:
        return Outcome(case, stage, refusal=error_line(output))
    problems = []
    whole = {event["step"]: event for event in events(folder, "whole", "step")}
    losses = [whole[step]["loss"] for step in sorted(whole)]
    if len(losses) != STEPS or not losses[-1] < losses[0]:
        problems.append(f"losses {losses}")
    middle = folder / f"runs/whole/checkpoints/step-{BROKEN}"
    output, code = _train(folder, "resumed", case, stage, f"run.resume={middle}")
    if code != 0:
        problems.append(f"resume: {error_line(output)}")
    else:
        for event in events(folder, "resumed", "step"):
            then = whole[event["step"]]
            if any(event[key] != then[key] for key in ("loss", "grad_norm", "lr", "sample_ids_sha256")):
                problems.append(f"resumed step {event['step']}: loss {event['loss']}, not {then['loss']}")
    problems += _exported(folder / f"runs/whole/checkpoints/step-{STEPS}", folder / "exported")
    return Outcome(case, stage, events(folder, "whole", "run_start")[0]["attention"], problems=tuple(problems))


def _train(folder: Path, name: str, case: Case, stage: int, *overrides: str) -> tuple[str, int]:
    process = start(
        [
            *("python", str(REPOSITORY / "train.py"), "--config", str(REPOSITORY / "config/recipes/demo.yaml")),
            *(f"run.dir={folder}/runs", f"run.name={name}", f"run.steps={STEPS}", "run.resume=never"),
            *(SMALL[:-1] + [f"data.cache_dir={folder.parent}/cache"]),
            *(f"model.architecture={case.architecture}", f"model.config={json.dumps(case.config)}"),
            *("model.activation_checkpointing=none", f"deepspeed.stage={stage}", "precision.compute=bf16"),
            *("schedule.warmup_steps=2", "optimizer.learning_rate=1e-2", "batch={global_size: 8, micro_size: 2}"),
            *(f"checkpoint.every_steps={BROKEN}", f"checkpoint.keep={STEPS}", "evaluate.every_steps=6"),
            *("evaluate.batches=1", "tracking.wandb=disabled", "generate.tokens=4"),
            *overrides,
        ],
        ranks=2,
    )
    output, _ = process.communicate(timeout=300)
    return output, process.returncode


def _exported(checkpoint: Path, out: Path) -> list[str]:
    """Export, load with transformers, and compare the logits with those of the masters themselves."""
    code = export([str(checkpoint), str(out), "--dtype", "fp32"])
    if code != 0:
        return [f"export: exit code {code}"]
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    masters = open_saved_model(checkpoint / "deepspeed")
    expected = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in expected.named_parameters():
            parameter.copy_(masters.tensors[name].read())
        ids = torch.arange(48).view(2, 24)
        found, wanted = (model(ids, use_cache=False).logits for model in (loaded, expected))
    return [] if torch.equal(found, wanted) else [f"logits differ by {float((found - wanted).abs().max()):.2g}"]


def stage_of(index: int) -> int:
    """ZeRO-2 and ZeRO-3 in turn."""
    return 2 + index % 2


def table(outcomes: Sequence[Outcome]) -> str:
    """The rows of docs/models.md."""
    lines = [
        f"transformers {transformers.__version__}, torch {torch.__version__.partition('+')[0]}:",
        "",
        "| model | `model.architecture` | ZeRO | `model.attention = auto` | trains, resumes, exports, loads |",
        "|---|---|---|---|---|",
    ]
    for outcome in outcomes:
        verdict = f"refused: {outcome.refusal}" if outcome.refusal else "; ".join(outcome.problems) or "yes"
        case = outcome.case
        lines.append(f"| {case.name} | {case.architecture} | {outcome.stage} | {outcome.attention} | {verdict} |")
    return "\n".join(lines)


def main(names: Sequence[str]) -> int:
    """Run every case, or those named, and write the table, or print it."""
    outcomes = []
    with tempfile.TemporaryDirectory() as name:
        for index, case in enumerate(CASES):
            if names and case.architecture not in names:
                continue
            folder = Path(name) / case.architecture
            folder.mkdir()
            outcomes.append(run_case(case, folder, stage=stage_of(index)))
            print(table(outcomes).splitlines()[-1], flush=True)
            shutil.rmtree(folder)
    if not names:
        text = TABLE.read_text()
        begin, end = text.index("<!-- table -->"), text.index("<!-- end -->")
        TABLE.write_text(f"{text[:begin]}<!-- table -->\n{table(outcomes)}\n{text[end:]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
