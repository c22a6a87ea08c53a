"""A small Llama and random batches, for tests of the engine: built through the real config and DeepSpeed JSON."""

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.deepspeed.document import read_document
from config.errors import UserError
from config.resolved import Resolved
from data.batches.loader import Batch
from lab.detection.plants.permanent import permanent
from lab.detection.plants.site import planted
from modeling.build import model_config
from precision.step_health import Health
from training import session
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.outcome import Saved, SaveFailed
from training.distributed import World
from training.engine import Engine
from training.engine.health import Update
from training.engine.tensors import trainable_parameters, whole_master
from training.progress import Progress

VOCABULARY = 64
SEQUENCE = 16
GLOBAL = 8


def resolve(
    world: World, *, stage: int, compute: str, micro: int = 4, variant: str = "", overrides: Sequence[str] = ()
) -> Resolved:
    """The demo recipe shrunk to a model of a few thousand parameters. variant: "_offload" for CPU offload."""
    return read_command_line(
        [
            "--config",
            str(REPOSITORY / "config/recipes/demo.yaml"),
            f"deepspeed.config={REPOSITORY}/ds_configs/zero{stage}_{compute}{variant}.json",
            f"precision.compute={compute}",
            "model.activation_checkpointing=none",
            "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, "
            "num_key_value_heads: 2, tie_word_embeddings: true}",
            f"batch.global_size={GLOBAL}",
            f"batch.micro_size={micro}",
            f"data.sequence_length={SEQUENCE}",
            "optimizer.learning_rate=0.01",
            "optimizer.weight_decay=0.1",
            *overrides,
        ]
    )


def gathered(folder: Path, compute: str) -> str:
    """The override for a ZeRO-3 JSON as large models need it: no parameter stays whole, groups and buckets are cut."""
    whole = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
    return changed_json(folder, f"zero3_{compute}", **whole, sub_group_size=3000, reduce_bucket_size=4096)


def changed_json(folder: Path, name: str, **zero: Any) -> str:
    """The override for a copy of ds_configs/NAME.json that has other values in its ZeRO section."""
    document = read_document(REPOSITORY / f"ds_configs/{name}.json")
    document["zero_optimization"] |= zero
    path = folder / f"{name}-{os.getpid()}.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    return f"deepspeed.config={path}"


def manifest_of(folder: str | Path, tree: dict[str, Any]) -> list[str]:
    """Overrides for the manifest path with a manifest of this process."""
    path = Path(folder) / f"manifest-{os.getpid()}.json"
    path.write_text(json.dumps(tree), encoding="utf-8")
    return ["precision.path=manifest", f"precision.manifest={path}"]


@contextmanager
def engine_of(world: World, resolved: Resolved, *, defect: str = "") -> Iterator[Engine]:
    """An engine on the resolved config, destroyed afterwards. defect: planted into it, as `permanent` takes it."""
    shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    plant = permanent(defect) if defect else None
    with planted(plant, rank=world.rank):
        engine = session.build_engine(resolved, shape, world)
    try:
        yield engine
    finally:
        engine.close()


def batch_of(world: World, micro: int, *, seed: int, mask: str = "uneven") -> Batch:
    """This rank's part of a random global batch of GLOBAL sequences, the same sequences for every layout.

    mask: uneven masks a different share of each sequence's labels; sequences masks all of the first half of the
    sequences, so that whole micro-batches and whole ranks have nothing to learn; all masks every label.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (GLOBAL, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    if mask == "uneven":
        for row in range(GLOBAL):
            labels[row, : row * SEQUENCE // GLOBAL] = -100
    elif mask == "sequences":
        labels[: GLOBAL // 2] = -100
    else:
        labels[:] = -100
    mine = slice(world.rank * GLOBAL // world.world_size, (world.rank + 1) * GLOBAL // world.world_size)
    labels = labels[mine]
    return Batch(
        position=0,
        input_ids=tokens[mine, :-1].reshape(-1, micro, SEQUENCE),
        labels=labels.reshape(-1, micro, SEQUENCE),
        sample_ids=np.arange(GLOBAL),
        label_tokens=int((labels != -100).sum()),
    )


class RandomBatches:
    """Random global batches without end, in the place of the data loader's."""

    def __init__(self, world: World, micro: int = 4) -> None:
        self._world, self._micro = world, micro
        self.position = 0
        self.record: dict[str, Any] = {}

    def next_step(self) -> Batch:
        """The next one."""
        self.position += 1
        return replace(batch_of(self._world, self._micro, seed=self.position), position=self.position - 1)

    def restore(self, position: int) -> None:
        """Go on from a batch by its number."""
        self.position = position


def faults_of(spoiled: Sequence[tuple[int, str, str | None]]) -> str:
    """The override that plants a fault in each step, given as rank, kind and module."""
    faults = [
        f"{{kind: {kind}, step: {step}, rank: {rank}{f', module: {module}' if module else ''}}}"
        for step, (rank, kind, module) in enumerate(spoiled, 1)
    ]
    return f"faults=[{', '.join(faults)}]"


def take(engine: Engine, batch: Batch, *, step: int, lr: float, **options: Any) -> tuple[Health, Update]:
    """A step on this batch: what was measured, and the update. options: of `Engine.step`."""
    health = engine.health(engine.forward_backward(batch, step=step))
    return health, engine.step(health, lr, **options)


def refused(world: World, *, stage: int, compute: str, overrides: Sequence[str]) -> str:
    """Why no engine is built with these overrides; empty when one is."""
    return refusal(world, resolve(world, stage=stage, compute=compute, overrides=overrides))


def refusal(world: World, resolved: Resolved) -> str:
    """Why no engine is built; empty when one is."""
    try:
        with engine_of(world, resolved):
            return ""
    except UserError as error:
        return str(error)


def state_of(engine: Engine, progress: Progress, **reactions: Any) -> dict[str, Any]:
    """The state that a run without guard and promotions saves."""
    return {"progress": asdict(progress), "scaler": engine.scaler_state(), "reactions": reactions}


def saved(checkpoints: Checkpoints, engine: Engine, progress: Progress, **reactions: Any) -> Saved:
    """Save and wait. Raises SaveFailed on every rank when any of them cannot write."""
    checkpoints.start_save(engine, state_of(engine, progress, **reactions))
    outcome = checkpoints.outcomes()[-1]
    if isinstance(outcome, SaveFailed):
        raise outcome
    return outcome


def restored(checkpoints: Checkpoints, path: Path | None, engine: Engine) -> Progress:
    """Load a checkpoint into the engine, its loss scaler too; the progress."""
    assert path is not None
    state = checkpoints.load(path, engine)
    engine.install_scaler(state["scaler"])
    return Progress(**state["progress"])


def masters_of(engine: Engine) -> dict[str, torch.Tensor]:
    """Every FP32 master, whole, by name. A collective."""
    return {name: whole_master(engine, parameter) for name, parameter in trainable_parameters(engine).items()}


def checksum(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of names and FP32 values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].float().numpy().tobytes())
    return digest.hexdigest()


def plain_model(resolved: Resolved, weights: dict[str, torch.Tensor], *, attention: str = "sdpa") -> torch.nn.Module:
    """The same model in plain torch FP32 with the given weights: the reference."""
    shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32, attn_implementation=attention)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model.train()
