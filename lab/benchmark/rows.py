"""The rows or pairs of every step of `lab.benchmark`, in Mantissa's order, as a dataset for the peers."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from config.errors import UserError
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, Batches
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards


def write_rows(resolved: Resolved, corpus: Corpus, folder: Path, *, warm_up: int) -> float:
    """Write the samples of all steps; returns the mean number of inputs per timed step, without padding.

    A folder of `datasets`, in the order of the global batches. Rows have `input_ids` and `labels`, unshifted; pairs
    have `prompt_ids`, `chosen_ids` and `rejected_ids`. Raises UserError for a pair that does not fit this form.
    """
    from datasets import Dataset

    from training.tasks.task import task_of

    config, shards = resolved.config, corpus.train
    assert isinstance(shards, RowShards)
    size, make = resolved.batch.global_size, task_of(config).make_batch(config, corpus)
    made = Batches(
        shards,
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        global_size=size,
        micro_size=size,
        rank=0,
        world_size=1,
        make_batch=make,
    )
    samples, inputs = [], []
    with closing(made) as batches:
        for _ in range(config.run.steps):
            batch = batches.next_step()
            inputs.append(batch.tokens)
            samples += [_sample(list(shards.sequence(int(number)))) for number in batch.sample_ids]
    Dataset.from_list(samples).save_to_disk(str(folder))
    return float(np.mean(inputs[warm_up:]))


def _sample(rows: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    if len(rows) == 1:
        ((ids, trained),) = rows
        return {"input_ids": ids.tolist(), "labels": np.where(trained, ids.astype(np.int64), IGNORED_LABEL).tolist()}
    prompts, answers = [], []
    for ids, trained in rows:
        start = len(ids) - int(trained.sum())
        if trained[:start].any():
            raise UserError("data: the answers of a pair do not end it; benchmarks take pairs that end with the answer")
        prompts.append(ids[:start].tolist())
        answers.append(ids[start:].tolist())
    if prompts[0] != prompts[1]:
        raise UserError("data: the prompts of a pair differ in their tokens; end prompts where a token ends")
    return {"prompt_ids": prompts[0], "chosen_ids": answers[0], "rejected_ids": answers[1]}
