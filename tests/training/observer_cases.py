"""Code run inside the processes of test_observers.py and test_self_check.py: a short job, observed, sound or not."""

import random
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import register_module_forward_hook
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.resolved import Resolved
from lab.detection.cells import defect_of
from lab.detection.plants.site import planted
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.training.checkpoint.resume_cases import last_by_step, trained
from training import session as session_module
from training.corruption.self_check import SelfCheck
from training.distributed import World
from training.engine import Engine
from training.engine.tensors import own_shards
from training.session import locked_run_dir, session

WIDTH = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536}
"""SmolLM2-135M's."""
NARROW = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 192}
STEPS = 3


MANIFESTS = {
    "mixed": {
        "default": "bf16",
        "rules": [{"match": "lm_head", "compute": "fp16", "reason": "to be another dtype than its surroundings"}],
    },
    "flex": {
        "default": "bf16",
        "rules": [{"match": "*.self_attn", "compute": "fp32", "reason": "no autocast for FlexAttention's queries"}],
    },
    "fp8": {
        "default": "bf16",
        "rules": [{"match": "*.mlp.*_proj", "compute": "fp8", "reason": "linear layers are what FP8 is for"}],
    },
}


def cast(dtype: str, stage: int) -> list[str]:
    """Overrides of the cast path."""
    return [f"deepspeed.config=ds_configs/zero{stage}_{dtype}.json", f"precision.compute={dtype}"]


def manifest(name: str, stage: int) -> list[str]:
    """Overrides of the manifest path."""
    where = f"deepspeed.config=ds_configs/zero{stage}_fp32.json"
    return [where, "precision.compute=auto", "precision.path=manifest", f"precision.manifest={{folder}}/{name}.json"]


def heavy_tailed(folder: Path, name: str, shape: dict[str, Any], *, family: str = "llama") -> None:
    """A model whose matrices are drawn from Student's t with 2.5 degrees of freedom. Real weights have such outliers,
    beside which the order and the rounding of a sum show."""
    torch.manual_seed(0)
    special = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 256, "vocab_size": 320}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, num_hidden_layers=2, **shape, **special))
    tails = torch.distributions.StudentT(torch.tensor(2.5))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                parameter.copy_(tails.sample(parameter.shape) * 0.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder / name)


def write_text(folder: Path) -> None:
    """A text of a few thousand letters."""
    (folder / "text").mkdir()
    letters = random.Random(0)
    for index in range(8):
        (folder / "text" / f"{index}.txt").write_text("".join(letters.choices("abcdefgh ", k=400)))


def resolve(folder: str, name: str, overrides: Sequence[str]) -> Resolved:
    """The job's config."""
    settings = [
        *("--config", str(REPOSITORY / "config/recipes/demo.yaml")),
        *(f"run.dir={folder}/runs", f"run.name={name}", f"run.steps={STEPS}", "run.resume=auto"),
        *("schedule.warmup_steps=1", "evaluate.every_steps=0", "checkpoint.every_steps=0", "checkpoint.at_end=false"),
        *("data.source=text", f"data.path={folder}/text", f"data.cache_dir={folder}/cache", "data.tokenizer=bytes"),
        *("data.sequence_length=32", "data.validation_fraction=0", "batch.global_size=4", "batch.micro_size=1"),
        *("model.architecture=null", f"model.name_or_path={folder}/base", "model.activation_checkpointing=none"),
        *("model.config={}", "model.loss=chunked", "model.loss_chunk_tokens=12"),
        *("tracking.wandb=disabled", "tracking.log_every_steps=1000", "telemetry.every_steps=0"),
        *("precision.loss_scale.initial=256", "optimizer.learning_rate=1e-3", "guard.self_check_every=0"),
        *overrides,
    ]
    return read_command_line(settings)


def job(
    world: World,
    *,
    folder: str,
    name: str,
    overrides: Sequence[str],
    observed: bool = True,
    flex: bool = False,
    passes: int | None = None,
) -> dict[str, Any]:
    """Resume the job and train it to its end; everything that must not depend on who looks on.

    observed: whether dtypes are, in the session's first step and where `precision.verify_every_steps` says. passes: it
    breaks off at the forward pass after so many.
    """
    resolved = resolve(folder, name, overrides)
    with (
        flex_on_cpu() if flex else nullcontext(),
        locked_run_dir(resolved, world),
        session(resolved, world=world, shares=("sequence", "expert")) as opened,
    ):
        found = trained(opened, passes, observed=observed)
        return found | {"steps": last_by_step(folder, name), "chunked": opened.engine.loss_path.chunked}


def planted_job(
    world: World, *, folder: str, name: str, overrides: Sequence[str], defect: str | None = None
) -> dict[str, Any]:
    """The job of `job`, checked in its first step. defect: its name in `lab.detection`."""
    known = defect_of(defect) if defect is not None else None
    plant, size = (known.plant, known.size) if known is not None else (None, 0.0)
    with planted(plant, rank=world.rank, size=size):
        return job(world, folder=folder, name=name, overrides=["guard.self_check_every=1", *overrides])


def kept_of_an_evaluation(world: World, *, folder: str, name: str, overrides: Sequence[str]) -> list[int]:
    """At each activation function of the evaluation pass that is compared, how many earlier ones' outputs are still in
    memory."""
    known, kept = list[StorageWeakRef](), list[int]()

    def look(module: torch.nn.Module, args: Any, output: Any) -> None:
        if type(module).__name__.startswith("SiLU") and not module.training and module._forward_hooks:
            kept.append(sum(not other.expired() for other in known))
            known.append(StorageWeakRef(output.untyped_storage()))

    with register_module_forward_hook(look):
        planted_job(world, folder=folder, name=name, overrides=overrides)
    return kept


def changed_job(world: World, *, folder: str, name: str, change: str) -> None:
    """A job in which somebody changes a group's weight decay, or sets moments to zero, after the first step."""
    step = Engine.step

    def changing(engine: Engine, *args: Any, **kwargs: Any) -> Any:
        update = step(engine, *args, **kwargs)
        optimizer = engine.deepspeed.optimizer
        if change == "decay" and engine.deepspeed.global_steps == 2:
            optimizer.param_groups[0]["weight_decay"] += 0.01
        return update

    def emptying(check: SelfCheck, number: int, first: int) -> bool:
        if change == "moments" and number == 2:
            for _, _, shard in own_shards(check._engine):
                shard.states(check._engine)["exp_avg"].zero_()
        return due(check, number, first)

    due = SelfCheck.due
    with patch.object(Engine, "step", changing), patch.object(SelfCheck, "due", emptying):
        planted_job(world, folder=folder, name=name, overrides=cast("bf16", 2))


def evaluating_less(world: World, *, folder: str, name: str, lost: str) -> None:
    """A job whose evaluations lose something."""
    batches, evaluate = session_module.validation_batches, Engine.evaluate

    def fewer(*args: Any, **kwargs: Any) -> Any:
        return list(batches(*args, **kwargs))[: -1 if lost == "its last batch" else None]

    def halved(engine: Engine, given: Any) -> Any:
        found = evaluate(engine, given)
        return found if lost == "its last batch" else found._replace(counted=found.counted / 2)

    further = ["data.validation_fraction=0.3", "evaluate.every_steps=2", "evaluate.batches=3"]
    with patch.object(session_module, "validation_batches", fewer), patch.object(Engine, "evaluate", halved):
        planted_job(world, folder=folder, name=name, overrides=[*cast("bf16", 2), *further])
