"""Put a run together: process group, run folder, model, engine, data, record."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from transformers import PretrainedConfig

from config.errors import UserError
from config.load import to_dict
from config.resolved import Resolved
from data.documents import Documents
from data.loader import Batches, validation_batches
from data.prepare import Corpus
from modeling.build import count_parameters
from precision.guard import Guard
from tracking.run_dir import RunDir
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.reader import Opener
from training.checkpoint.retention import Retention
from training.distributed import Place
from training.engine import Engine, build_engine
from training.parts import Parts
from training.preemption import Preemption
from training.profile.profiler import open_profiling
from training.progress import Progress
from training.promotions import Promotions
from training.sinks import open_record
from training.telemetry import Telemetry
from training.tracing.spans import open_tracing


def build(resolved: Resolved, corpus: Corpus, model_config: PretrainedConfig, place: Place) -> tuple[Parts, Progress]:
    """Everything a run needs, restored from a checkpoint where `run.resume` finds one, and its `run_start` recorded.

    A collective. Raises UserError for what only shows now: a folder that cannot be written, weights that cannot be
    loaded, a checkpoint of another run.
    """
    config = resolved.config
    run_dir = open_run_dir(resolved, place)
    engine = build_engine(resolved, model_config, place)
    checkpoints = open_checkpoints(
        resolved, run_dir.checkpoints, place, identity=identity(resolved, corpus, model_config, engine)
    )
    seed_everything(config.run.seed + place.rank)
    _check_validation(resolved, corpus)
    found = checkpoints.find(config.run.resume)
    guard, promotions, progress = Guard(config.guard), Promotions(), Progress()
    if found:
        progress, state = checkpoints.load(found, engine)
        guard.load_state_dict(state["guard"])
        promotions.load_state_dict(state["promotions"], engine.regions)
    shape = batch_shape(resolved, corpus)
    batches = Batches(corpus.train, seed=config.run.seed, **shape)
    batches.restore(progress.position)
    record = open_record(resolved, corpus, engine, run_dir, place)
    for line in engine.notes:
        record.note(line)
    parts = Parts(
        resolved=resolved,
        engine=engine,
        batches=batches,
        validation=lambda: validation_batches(corpus.validation, batches=config.evaluate.batches, **shape),
        guard=guard,
        promotions=promotions,
        checkpoints=checkpoints,
        preemption=Preemption(config.run.max_minutes),
        telemetry=Telemetry(engine, probe=config.telemetry.probe) if config.telemetry.every_steps else None,
        record=record,
        first_step=progress.step,
        tracing=open_tracing(
            resolved, place, engine=engine, batches=batches, checkpoints=checkpoints, note=record.note
        ),
        profiling=open_profiling(resolved, run_dir.path, engine=engine, batches=batches, note=record.note),
    )
    _record_start(parts, progress, found)
    for line in checkpoints.settle():
        record.note(line)
    return parts, progress


def open_checkpoints(resolved: Resolved, folder: Path, place: Place, *, identity: dict[str, Any]) -> Checkpoints:
    """The run's checkpoints as its config wants them. Raises UserError: no such key, or the store cannot be used."""
    section = resolved.config.checkpoint
    keep, remote = Retention(section.keep, every=section.keep_every, best=section.keep_best), None
    if section.dir is not None:
        from training.checkpoint.store.remote import Remote  # brings fsspec, which most runs do not need
        from training.checkpoint.store.store import Store

        store = Store(f"{section.dir.rstrip('/')}/{resolved.config.run.name}", section.storage_options)
        problem = _why_not_usable(store) if place.is_main else None
        problem = place.from_main(problem)
        if problem is not None:
            raise UserError(problem)
        remote, keep = Remote(store, keep), Retention(1)
    return Checkpoints(
        folder,
        keep=keep,
        identity=identity,
        place=place,
        background=section.background == "always" or (section.background == "auto" and resolved.offload == "none"),
        verify_after_save=section.verify_after_save,
        opener=Opener.of(section),
        remote=remote,
    )


def _why_not_usable(store: Any) -> str | None:
    try:
        store.require_usable()
    except UserError as error:
        return str(error)
    return None


def _record_start(parts: Parts, progress: Progress, found: Path | None) -> None:
    resolved, engine = parts.resolved, parts.engine
    config = resolved.config
    parts.record.event(
        "run_start",
        step=progress.step,
        tokens=progress.tokens,
        world_size=resolved.world_size,
        config_sha256=hashlib.sha256(json.dumps(to_dict(config), sort_keys=True).encode()).hexdigest(),
        parameters=count_parameters(engine.model),
        compute=resolved.compute,
        zero_stage=resolved.zero_stage,
        resumed_from=str(found) if found else None,
        name=config.run.name,
        model=type(engine.model).__name__,
        accumulation=resolved.batch.accumulation,
        hypothesis=config.run.hypothesis,
        regions=engine.regions.dtypes if engine.regions is not None else None,
    )


def batch_shape(resolved: Resolved, corpus: Corpus) -> dict[str, Any]:
    """How this rank's batches are cut: arguments of the data loader."""
    config = resolved.config
    one_row = config.model.attention.startswith("flash_attention")  # whose kernels take documents of any length
    return {
        "documents": Documents(corpus.end_of_document, one_row=one_row) if config.data.document_masking else None,
        "sequence_length": config.data.sequence_length,
        "global_size": resolved.batch.global_size,
        "micro_size": resolved.batch.micro_size,
        "rank": resolved.rank,
        "world_size": resolved.world_size,
    }


def open_run_dir(resolved: Resolved, place: Place) -> RunDir:
    """The run folder, made by rank 0 and known to all. A resumed run goes on in its own."""
    run = resolved.config.run
    root, error = Path(run.dir).expanduser(), None
    if place.is_main:
        try:
            RunDir.create(root, run.name, fresh=run.resume == "never")
        except Exception as problem:  # carried to every rank, so that none waits for one that has stopped
            error = problem
    error = place.from_main(error)
    if error is not None:
        raise error
    return RunDir(root / run.name)


def seed_everything(seed: int) -> None:
    """Seed the generators that dropout, sampling and third-party code draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _check_validation(resolved: Resolved, corpus: Corpus) -> None:
    config = resolved.config
    if config.evaluate.every_steps and not corpus.validation.sequences(config.data.sequence_length):
        raise UserError(
            f"evaluate.every_steps = {config.evaluate.every_steps}: the validation set holds no sequence of "
            f"{config.data.sequence_length} tokens; give more documents, raise data.validation_fraction = "
            f"{config.data.validation_fraction}, or set evaluate.every_steps=0"
        )


def identity(resolved: Resolved, corpus: Corpus, model_config: PretrainedConfig, engine: Engine) -> dict[str, Any]:
    """What two runs must share for one to go on from the other's checkpoint."""
    config = resolved.config
    return {
        "model": model_config.model_type,
        "parameters": count_parameters(engine.model),
        "data fingerprint": corpus.fingerprint,
        "data.sequence_length": config.data.sequence_length,
        "data.document_masking": config.data.document_masking,
        "batch.global_size": resolved.batch.global_size,
        "run.seed": config.run.seed,
        "world size": resolved.world_size,
        "ZeRO stage": resolved.zero_stage,
        "precision.compute": resolved.compute,
        "offload": resolved.offload,
        "deepspeed": deepspeed.__version__,
    }
