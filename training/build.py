"""Put a run together: process group, run folder, model, engine, data, record."""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
from transformers import PretrainedConfig
from transformers.integrations import HfDeepSpeedConfig

from config.command_line import Resolved
from config.errors import UserError
from config.load import to_dict
from data.documents import Documents
from data.loader import Batches, validation_batches
from data.prepare import Corpus
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.activation_checkpointing_budget import keep_within
from modeling.build import Gather, build_model, count_parameters
from modeling.compiling import compile_blocks, require_compilable
from modeling.document_masking import require_documents_apart
from modeling.kernels import require_liger
from precision.guard import Guard
from tracking.run_dir import RunDir
from training.checkpoint import Checkpoints, Retention
from training.checkpoint_files import Opener
from training.distributed import Place
from training.engine import Engine
from training.kernel_choice import choose_kernels
from training.open_record import open_record
from training.parts import Parts
from training.preemption import Preemption
from training.profiling import open_profiling
from training.progress import Progress
from training.recovery import Promotions
from training.telemetry import Telemetry
from training.tracing import open_tracing
from training.weights_start import start_from_weights


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
        from training.checkpoint_remote import Remote  # brings fsspec, which most runs do not need
        from training.checkpoint_store import Store

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


def build_engine(resolved: Resolved, model_config: PretrainedConfig, place: Place) -> Engine:
    """The model under the resolved DeepSpeed config, with its activation checkpointing, on this rank."""
    config = resolved.config
    if config.model.compile:
        require_compilable(resolved.zero_stage)
    if config.model.kernels == "liger":
        require_liger(model_config.model_type, place.device)
    # transformers builds and loads the model partitioned for as long as this object lives and says ZeRO-3.
    zero3 = HfDeepSpeedConfig(resolved.deepspeed) if resolved.zero_stage == 3 else None
    gather = _gather_partitioned(place) if zero3 else _already_whole
    model = build_model(config.model, model_config, seed=config.run.seed, gather=gather)
    notes = choose_kernels(model, resolved, place)
    apply_activation_checkpointing(
        model,
        config.model.activation_checkpointing,
        reentrant=config.model.checkpointing_reentrant,
        every=config.model.checkpointing_every,
    )
    engine = Engine(model, resolved, place)
    engine.notes += notes
    if config.model.name_or_path is not None:
        start_from_weights(engine, config.model.name_or_path)
    if config.data.document_masking:
        _require_documents_apart(engine)
    if config.model.activation_memory_gib is not None:
        _recompute_within(engine, resolved, config.model.activation_memory_gib)
    if config.model.compile:
        engine.notes.append(compile_blocks(engine.model, _one_micro_batch(engine, resolved)))
    return engine


def _require_documents_apart(engine: Engine) -> None:
    def forward(inputs: dict[str, Any]) -> torch.Tensor:
        logits: torch.Tensor = engine.deepspeed(**inputs, use_cache=False).logits
        return logits

    engine.deepspeed.eval()
    require_documents_apart(forward, engine.model.config, engine.place.device)
    engine.deepspeed.train()


def _one_micro_batch(engine: Engine, resolved: Resolved) -> Callable[[], None]:
    """A forward pass in training, on a micro-batch of the run's shape."""
    vocabulary = engine.model.config.get_text_config().vocab_size
    shape = (resolved.batch.micro_size, resolved.config.data.sequence_length)
    inputs: dict[str, Any] = {"input_ids": torch.arange(math.prod(shape)).remainder_(vocabulary).view(shape)}
    if resolved.config.data.document_masking:  # the mask is kept as well
        inputs["position_ids"] = torch.arange(shape[1]).remainder_(max(shape[1] // 2, 1)).expand(shape)
    inputs = {name: ids.to(engine.place.device) for name, ids in inputs.items()}

    def forward() -> None:
        engine.deepspeed.train()
        engine.loss_path.loss_sum(inputs, inputs["input_ids"], 1.0, inspected=False)

    return forward


def _recompute_within(engine: Engine, resolved: Resolved, gib: float) -> None:
    place, forward = engine.place, _one_micro_batch(engine, resolved)

    def largest(values: Sequence[int]) -> list[int]:
        rows = place.gather(torch.tensor(values, dtype=torch.float64, device=place.device))
        return [int(value) for value in rows.amax(dim=0).tolist()]

    engine.notes.append(keep_within(engine.model, gib, forward=forward, largest=largest).text)


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


def _gather_partitioned(place: Place) -> Gather:
    @contextmanager
    def gather(parameters: Sequence[torch.nn.Parameter]) -> Iterator[bool]:
        with deepspeed.zero.GatheredParameters(list(parameters), modifier_rank=0):
            yield place.is_main

    return gather


def _already_whole(parameters: Sequence[torch.nn.Parameter]) -> AbstractContextManager[bool]:
    return nullcontext(True)
