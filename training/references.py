"""The reference of preference optimisation: log-probabilities of every pair's answers under the initial weights.

The engine computes them before the first step, in its compute dtype and in micro-batches of the same shapes as in
training, so the first step's margins are exactly 0. They are kept in FP32, in a file beside the prepared data.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import cast

import numpy as np
import torch
import transformers

from config.cli import REPOSITORY
from config.errors import UserError, one_line
from config.resolved import Resolved
from data.array_file import Arrays, read_arrays, write_arrays
from data.batches.loader import NO_SAMPLE, Batch
from data.batches.preference_batches import REFERENCE, batches_of_pairs, lengths_of_corpus
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from modeling.build import config_identity
from modeling.objectives.preference import log_probs
from training.engine import Engine

SECONDS_BETWEEN_LINES = 30.0
_NOT_DECIDING = {
    *("activation_checkpointing", "checkpointing_every", "checkpointing_reentrant", "activation_memory_gib"),
    *("loss", "loss_chunk_tokens"),
}
"""Keys of `model` that do not change the numbers."""


def add_references(corpus: Corpus, engine: Engine, resolved: Resolved, *, base: str | None) -> list[str]:
    """Give every split of the corpus its column REFERENCE, from the file or computed now with the engine's initial
    weights; returns notes to record. base: the weights' identity; None if they are drawn from the seed. A collective.
    Raises UserError for a log-probability that is not finite."""
    world, lengths, started = engine.world, lengths_of_corpus(corpus), time.perf_counter()
    splits = {"train": cast(RowShards, corpus.train), "validation": cast(RowShards, corpus.validation)}
    pairs = f"{sum(len(shards.longest) for shards in splits.values()):,} pairs"
    device = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
    identity = _identity(corpus, resolved, base, lengths, device)
    path = corpus.folder / f"references-{hashlib.sha256(identity.encode()).hexdigest()[:20]}.safetensors"
    tables: Arrays | None = world.from_main(_read(path, identity, splits, lengths) if world.is_main else None)
    if tables is not None:
        notes = [f"reference: log-probabilities of {pairs}, computed earlier, from {path}"]
    else:
        micro = resolved.batch.micro_size
        if world.is_main:
            text = f"computing the log-probabilities of {pairs} under the start weights, before step 1"
            print(f"reference: {text}", flush=True)
        tables = {name: _computed(engine, shards, lengths, micro) for name, shards in splits.items()}
        _require_finite(tables, splits, lengths, engine.compute)
        seconds = time.perf_counter() - started
        notes = [f"reference: log-probabilities of {pairs} under the start weights took {seconds:.1f} s"]
        notes += world.on_main(lambda: _write(path, identity, tables))
    for name, shards in splits.items():
        shards.columns[REFERENCE] = tables[name]
    first = 0
    for split in corpus.validation_by_source.values():  # their rows, one split after another, are the validation set's
        shards = cast(RowShards, split)
        shards.columns[REFERENCE] = tables["validation"][first : first + len(shards.longest)]
        first += len(shards.longest)
    return notes


def _computed(engine: Engine, shards: RowShards, lengths: tuple[int, ...], micro: int) -> np.ndarray:
    """(pairs, lengths, 2) float32; each rank computes its share of the micro-batches."""
    world = engine.world
    found = np.full((len(shards.longest), len(lengths), 2), np.nan, dtype=np.float32)
    for number, length in enumerate(lengths):
        fitting = np.flatnonzero(shards.longest <= length)
        each = micro * world.world_size
        padded = np.full(-(-len(fitting) // each) * each, NO_SAMPLE, dtype=np.int64)
        padded[: len(fitting)] = fitting
        mine = padded.reshape(-1, world.world_size, micro)[:, world.rank]
        values = torch.zeros(len(found), 2, device=world.device)
        make_batch = batches_of_pairs((length,))
        batches = (make_batch(shards, 0, ids, ids[None]) for ids in mine)
        results = engine.infer(log_probs, _told(batches, len(mine), length) if world.is_main else batches)
        for ids, result in zip(mine, results, strict=True):
            real = torch.from_numpy(ids != NO_SAMPLE).to(world.device)
            values[torch.from_numpy(ids).to(world.device)[real]] = result[real].float()
        world.sum(values)  # only one rank computes a pair, so nothing is rounded
        found[fitting, number] = values.cpu().numpy()[fitting]
    return found


def _told(batches: Iterator[Batch], count: int, length: int) -> Iterator[Batch]:
    """The batches, with an occasional line on how many are done."""
    spoken = time.monotonic()
    for number, batch in enumerate(batches):
        if time.monotonic() - spoken >= SECONDS_BETWEEN_LINES:
            spoken = time.monotonic()
            print(f"reference: {number:,} of {count:,} micro-batches of {length} tokens", flush=True)
        yield batch


def _identity(corpus: Corpus, resolved: Resolved, base: str | None, lengths: tuple[int, ...], device: str) -> str:
    """Everything that decides the numbers, as JSON."""
    config, manifest = resolved.config, resolved.config.precision.manifest
    model = {key: value for key, value in asdict(config.model).items() if key not in _NOT_DECIDING}
    parts = {
        "data": corpus.fingerprint,
        "start weights": base or f"seed {config.run.seed}",
        **({"config": config_identity(str(config.model.name_or_path))} if base else {}),
        "model": model,
        "compute": resolved.compute,
        "manifest": (REPOSITORY / manifest).read_text(encoding="utf-8") if manifest else None,
        "fp8": asdict(config.precision.fp8) if manifest else None,
        "routers": config.precision.routers,
        "base": [config.adapter.base, config.adapter.double_quant],
        "micro-batch": resolved.batch.micro_size,
        "lengths": lengths,
        "device": device,
        "versions": [torch.__version__, transformers.__version__],
    }
    return json.dumps(parts, sort_keys=True)


def _read(path: Path, identity: str, splits: dict[str, RowShards], lengths: tuple[int, ...]) -> Arrays | None:
    """The file's columns; None if it is missing, damaged or belongs to something else, to be written anew."""
    tables, said = read_arrays(path) or ({}, {})
    shapes = {name: (len(shards.longest), len(lengths), 2) for name, shards in splits.items()}
    whole = {name: table.shape for name, table in tables.items()} == shapes
    return tables if whole and said == {"identity": identity} else None


def _write(path: Path, identity: str, tables: Arrays) -> list[str]:
    """Publish the columns; only a note if that fails, because the run has them anyway."""
    try:
        write_arrays(path, tables, {"identity": identity})
    except OSError as error:
        return [f"reference: not kept, so a resumed run computes it again: {path} ({one_line(error)})"]
    return []


def _require_finite(tables: Arrays, splits: dict[str, RowShards], lengths: tuple[int, ...], compute: str) -> None:
    for name, table in tables.items():
        fits = splits[name].longest[:, None] <= np.array(lengths)
        bad = np.flatnonzero((~np.isfinite(table).all(-1) & fits).any(-1))
        if len(bad):
            raise UserError(
                f"precision.compute = {compute}: the start weights give {len(bad):,} of {len(table):,} {name} pairs "
                f"log-probabilities that are not finite (first: pair {bad[0] + 1}); choose fp32 or bf16"
            )
