"""Rows on which two models are compared: from the run's own data, a config's, or a file."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch

from config.errors import UserError
from config.load import load_config
from config.schema import Config
from config.task import CAUSAL_LM, model_class_of, settle_task, source_of
from data.batches.loader import IGNORED_LABEL, Batch
from data.corpora.corpus import Corpus, open_corpus
from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards
from training.tasks.task import prepare, task_of

ROWS = 8
"""Number of rows read by default."""
_TOKENS = 512
"""At most this many tokens of a row are used, and never more than a sequence of the run, the model's positions."""
_CONFIGS = (".yaml", ".yml")

Unit = Literal["token", "label", "number"]


@dataclass(frozen=True)
class Row:
    """Inputs for two models, and the positions at which their outputs are compared."""

    inputs: dict[str, Any]
    """Arguments of a model; the tensors among them are (1, n) int64."""
    places: torch.Tensor
    """(m,) int64: positions among the outputs, in order."""
    labels: torch.Tensor
    """(m,) int64: the correct label at each of these positions, IGNORED_LABEL if there is none."""
    unit: Unit = "token"
    """The unit of an output: logits of a token, or of the label of a word or text, or a predicted number."""

    @classmethod
    def of_text(cls, ids: torch.Tensor) -> Self:
        """A whole text, as a causal language model reads it. ids: (n,) int64."""
        following = torch.cat([ids[1:], ids.new_tensor([IGNORED_LABEL])])
        return cls({"input_ids": ids[None], "use_cache": False}, torch.arange(len(ids)), following)


def rows_of_run(folder: Path, config: Config, count: int = ROWS) -> list[Row]:
    """Held-out rows of a prepared corpus, or training rows if none are held out; empty if the corpus is gone."""
    try:
        corpus = open_corpus(folder, verify=False)
    except UserError:
        return []
    return rows_of(corpus, config, count, longest=config.data.longest)


def rows_of_data(data: str, config: Config, tokenizer: Path, count: int = ROWS) -> list[Row]:
    """Rows of a config's data, or of a file, as the run of `config` would see them, under its tokenizer.

    data: a run config (.yaml), or a file or glob of the run's kind of rows; text files are read as documents. Raises
    UserError if the data are for another kind of model, cannot be prepared, have no row or have a new label.
    """
    chosen = _of_config(data, config) if Path(data).suffix in _CONFIGS else _of_file(data, config)
    section = dataclasses.replace(chosen.data, tokenizer=str(tokenizer))
    corpus = prepare(dataclasses.replace(chosen, data=section), progress=False)
    for name in corpus.labels:
        if name not in config.classify.labels:
            raise UserError(f"--compare-logits {data}: has the label {name!r}, which is new to the model; remove it")
    rows = rows_of(corpus, dataclasses.replace(config, data=section), count, longest=config.data.longest)
    if not rows:
        raise UserError(f"--compare-logits {data}: holds no row; give more of it")
    return rows


def rows_of(corpus: Corpus, config: Config, count: int, *, longest: int) -> list[Row]:
    """At most `count` rows, evenly spread over the held-out split, or over the training split if that is empty.

    config: the run's, with the data section of the corpus. longest: [tokens] maximum length of a row.
    """
    longest, causal = min(longest, _TOKENS), model_class_of(config) == CAUSAL_LM
    for split in (corpus.validation, corpus.train):
        found = _texts(split, count, longest) if causal else _samples(split, corpus, config, count, longest)
        if rows := [row for row in found if len(row.places)]:
            return rows
    return []


def _texts(split: TokenShards | RowShards, count: int, longest: int) -> list[Row]:
    if isinstance(split, RowShards):
        texts = [split.row(int(number))[0][:longest] for number in _spread(split.rows, count)]
    else:
        length = min(longest, split.tokens - 1)
        numbers = _spread(split.sequences(length) if length > 0 else 0, count)
        texts = [window[:length] for window in split.read(numbers, length)] if len(numbers) else []
    return [Row.of_text(torch.as_tensor(text.astype("int64"))) for text in texts]


def _samples(split: TokenShards | RowShards, corpus: Corpus, config: Config, count: int, longest: int) -> Iterator[Row]:
    """Samples as in the task's own batches."""
    if isinstance(split, RowShards):
        available = split.rows
    else:
        length = max(min(longest, split.tokens - 1), 1)
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, sequence_length=length))
        available = split.sequences(length)
    make = task_of(config).make_batch(config, corpus)
    assert make is not None
    regression = config.classify.kind == "regression"
    unit: Unit = "token" if config.task != "classify" else "number" if regression else "label"
    for number in _spread(available, count):
        yield _row(make(split, 0, number.reshape(1), number.reshape(1, 1)), longest, unit)


def _row(batch: Batch, longest: int, unit: Unit) -> Row:
    """The only sample of a batch without its padding; for an encoder, at the positions that have a label."""
    given, labels = {"input_ids": batch.input_ids, **batch.further}, batch.labels[0, 0]
    answer = given.pop("decoder_input_ids", None)
    given.pop("targets", None)
    length = min(int(given["attention_mask"].sum()), longest)
    inputs: dict[str, Any] = {name: values[0, :, :length] for name, values in given.items()}
    if answer is not None:
        length = min(int((labels != IGNORED_LABEL).sum()), longest)
        inputs |= {"decoder_input_ids": answer[0, :, :length], "use_cache": False}
    [places] = (labels[:length] != IGNORED_LABEL).nonzero(as_tuple=True)
    return Row(inputs, places, labels[places], unit)


def _of_config(data: str, config: Config) -> Config:
    """A run config; unless for a causal language model, with the sequence lengths of the run that is compared."""
    chosen = settle_task(load_config(Path(data), [], None))
    if (model_class_of(chosen), chosen.classify.kind) != (model_class_of(config), config.classify.kind):
        theirs, own = (
            f"task = {one.task}" + (f", classify.kind = {one.classify.kind}" if one.task == "classify" else "")
            for one in (chosen, config)
        )
        raise UserError(f"--compare-logits {data}: has {theirs}, the exported run {own}; give one that trains the same")
    if model_class_of(config) == CAUSAL_LM:
        return chosen
    length, target_length = config.data.sequence_length, config.data.target_length
    section = dataclasses.replace(chosen.data, sequence_length=length, target_length=target_length)
    return dataclasses.replace(chosen, data=section)


def _of_file(data: str, config: Config) -> Config:
    """The run's config with this file as its only data, none of it held out."""
    if not Path(data).expanduser().exists():
        raise UserError(f"--compare-logits {data}: is not there; give a run config or a file of rows or text")
    known, task = source_of(data), config.task
    kind: Any = known if known in ("jsonl", "parquet") else "text"
    if kind == "text" and model_class_of(config) == CAUSAL_LM:
        task = "pretrain"
    elif kind == "text" and task != "mlm":
        raise UserError(f"--compare-logits {data}: is text, and task = {task} reads rows; give JSONL or Parquet")
    alone: dict[str, Any] = {"sources": (), "validation": (), "name": None, "document_separator": None}
    section = dataclasses.replace(config.data, path=data, source=kind, validation_fraction=0.0, **alone)
    return dataclasses.replace(config, data=section, task=task)


def _spread(available: int, count: int) -> Any:
    taken = min(available, count)
    return np.arange(taken, dtype=np.int64) * available // max(taken, 1)
