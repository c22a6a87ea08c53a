"""Code run inside the processes of test_start.py. Every function is called on every rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoModelForCausalLM

from modeling.adapter import add_adapter
from modeling.build import build_model, model_config
from tests.support.models.small_run import SEQUENCE, VOCABULARY, engine_of, masters_of, resolve, take
from tests.support.models.small_run import batch_of as batch
from training.distributed import World
from training.engine.expert_slices import forget_groups
from training.engine.ledger import PrecisionError, read_start
from training.engine.masters import local_masters
from training.engine.tensors import trainable_parameters, whole_weight
from training.engine.weights import StaleMaster, require_fresh_masters

Cell = tuple[str, list[str]]
"""Name of a way to start, and its overrides."""


def start(world: World, *, stage: int, compute: str, cells: list[Cell], variant: str = "") -> dict[str, dict[str, Any]]:
    """Differences from an FP32 model built without ZeRO, the ledger's row, and counts of masters, cell by cell."""
    found = {}
    for name, overrides in cells:
        resolved = resolve(world, stage=stage, compute=compute, variant=variant, overrides=overrides)
        expected = {key: value.detach() for key, value in _plain(resolved.config).named_parameters()}
        shared = _shared(world, resolved)
        with engine_of(shared, resolved) as engine:
            masters = masters_of(engine)
            row = read_start(engine)
            weights = {key: whole_weight(engine, value) for key, value in trainable_parameters(engine).items()}
            if shared.tensor is None:  # whose ranks would need the same batch
                take(engine, batch(shared, 4, seed=1), step=1, lr=0.0)  # copies masters to weights
            stepped = {key: whole_weight(engine, value) for key, value in trainable_parameters(engine).items()}
        wrong = [key for key, master in masters.items() if not _same(master, expected[key])]
        wrong += [key for key, weight in weights.items() if not _same(weight, expected[key].to(weight.dtype))]
        wrong += [key for key, weight in stepped.items() if not torch.equal(weight, weights[key])]
        rounds = sum(not torch.equal(weights[key].float(), expected[key]) for key in masters)
        found[name] = {"wrong": wrong, "said": row.dtype, "masters": len(masters), "round": rounds}
    return found


def changed(world: World, *, stage: int, compute: str) -> list[str]:
    """The ledger's complaint when one rank's master changed a little before the first step, the check's when it did so
    by more than a weight's rounding."""
    found = []
    with engine_of(world, resolve(world, stage=stage, compute=compute)) as engine:
        for change, check in ((1e-6, read_start), (0.5, require_fresh_masters)):
            if world.rank == 1:
                local_masters(engine.deepspeed.optimizer)[0].data[5] += change
            try:
                check(engine)
            except (StaleMaster, PrecisionError) as error:
                found.append(str(error))
    return found


def misread(world: World, *, stage: int, overrides: list[str]) -> str:
    """The error of a start from files that were read wrongly: a norm's weights are not theirs."""
    resolved = resolve(world, stage=stage, compute="bf16", overrides=overrides)

    def wrong(*given: Any, **options: Any) -> Any:
        model = build_model(*given, **options)
        with torch.no_grad(), options["gather"]([model.model.norm.weight]):
            model.model.norm.weight.mul_(1.001)
        return model

    with mock.patch("training.engine.build.build_model", wrong):
        try:
            with engine_of(world, resolved):
                return ""
        except StaleMaster as error:
            forget_groups()
            return str(error)


def _plain(config: Any) -> torch.nn.Module:
    if config.model.name_or_path is not None:
        model = AutoModelForCausalLM.from_pretrained(config.model.name_or_path, dtype=torch.float32)
    else:
        shape = model_config(config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
        model = build_model(config.model, shape, seed=config.run.seed)
    return model if config.adapter.kind == "none" else add_adapter(model, config.adapter, seed=config.run.seed)


def _shared(world: World, resolved: Any) -> World:
    parallel = resolved.config.parallel
    world = world.sharing_tensors(parallel.tensor, timeout_minutes=1)
    return world.sharing_experts(parallel.expert, timeout_minutes=1)


def _same(found: torch.Tensor, expected: torch.Tensor) -> bool:
    bits = torch.int32 if found.dtype == torch.float32 else torch.int16
    return found.dtype == expected.dtype and torch.equal(found.view(bits), expected.view(bits))


def save_models(world: World, *, folder: str, models: Mapping[str, list[str]], dtype: str) -> None:
    """Hugging Face folders of drawn models by name, in a dtype."""
    for name, overrides in models.items():
        resolved = resolve(world, stage=0, compute="fp32", overrides=["run.seed=5", *overrides])
        if world.is_main:
            _plain(resolved.config).to(getattr(torch, dtype)).save_pretrained(Path(folder) / f"{name}-{dtype}")
    world.wait_for_all()
