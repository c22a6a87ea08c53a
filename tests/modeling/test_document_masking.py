"""Packed documents: a model computes for each what it computes for that document alone, or is refused."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.batches.loader import IGNORED_LABEL, Batch
from data.corpora.documents import cumulative_lengths, document_positions
from modeling.document_masking import require_documents_apart
from modeling.linear_cross_entropy import label_loss_sum
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.support.models.small_models import small_model
from tests.support.refusals import refused

WIDTH = {"hidden_size": 64, "vocab_size": 128}
APART: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "mixtral": {},
    "gpt2": {},
}
LEAKING = {"opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "bloom": {}, "falcon": {}}
END = 3


def model(name: str, settings: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    attention = "eager" if name in {"gemma2", "bloom"} else "sdpa"
    return small_model(name, attention, **WIDTH, **settings).to(dtype)


def forward_of(built: PreTrainedModel) -> Callable[[dict[str, Any]], torch.Tensor]:
    return lambda inputs: built(**inputs, use_cache=False).logits


def packed(generator: np.random.Generator, rows: int, length: int) -> np.ndarray:
    """Rows of random documents of 1 to 12 tokens, the last of which is END."""
    stream: list[int] = []
    while len(stream) < rows * length:
        size = int(generator.integers(0, 12))
        stream += [int(token) for token in generator.integers(4, 128, size=size)] + [END]
    return np.array(stream[: rows * length], dtype=np.int64).reshape(rows, length)


def split(row: np.ndarray) -> list[np.ndarray]:
    """The documents of a row, by the definition."""
    documents: list[list[int]] = [[]]
    for token in row.tolist():
        documents[-1].append(token)
        if token == END:
            documents.append([])
    return [np.array(document) for document in documents if document]


@pytest.mark.parametrize("seed", range(5))
def test_positions_and_lengths_are_those_of_the_documents(seed: int) -> None:
    ids = packed(np.random.default_rng(seed), rows=3, length=40)
    positions = document_positions(ids, END)
    documents = [document for row in ids for document in split(row)]
    for row, found in zip(ids, positions, strict=True):
        assert found.tolist() == [index for document in split(row) for index in range(len(document))]
    lengths = [len(document) for document in documents]
    assert cumulative_lengths(positions).tolist() == [0, *np.cumsum(lengths).tolist()]
    assert cumulative_lengths(positions).dtype == np.int32


def a_batch(ids: np.ndarray, *, one_row: bool) -> Batch:
    labels = np.concatenate([ids[:, 1:], np.full((len(ids), 1), 5)], axis=1)
    labels[ids == END] = IGNORED_LABEL
    return Batch(
        position=0,
        input_ids=torch.from_numpy(ids).unsqueeze(0),
        labels=torch.from_numpy(labels).unsqueeze(0),
        sample_ids=np.arange(len(ids)),
        label_tokens=int((labels != IGNORED_LABEL).sum()),
        position_ids=torch.from_numpy(document_positions(ids, END)).unsqueeze(0),
        one_row=one_row,
    )


def loss_and_gradients(built: PreTrainedModel, loss: torch.Tensor) -> tuple[float, dict[str, torch.Tensor]]:
    built.zero_grad()
    loss.backward()
    return float(loss.detach()), {name: p.grad.clone() for name, p in built.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("one_row", [False, True], ids=["rows", "one row"])
@pytest.mark.parametrize("name", APART)
def test_packed_documents_train_as_each_one_alone(name: str, one_row: bool) -> None:
    built = model(name, APART[name])
    ids = packed(np.random.default_rng(7), rows=2, length=24)
    batch = a_batch(ids, one_row=one_row)
    ((inputs, labels),) = batch.micro_batches(torch.device("cpu"))
    varlen = {key: inputs.pop(key) for key in list(inputs) if key not in {"input_ids", "position_ids"}}
    assert sorted(varlen) == (["cu_seq_lens_k", "cu_seq_lens_q", "max_length_k", "max_length_q"] if one_row else [])
    assert inputs["input_ids"].shape == ((1, 48) if one_row else (2, 24))
    whole = loss_and_gradients(built, label_loss_sum(built(**inputs, use_cache=False).logits, labels))
    assert_as_alone(built, ids, batch, whole)


@pytest.mark.slow
@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2"])
def test_flex_attention_trains_packed_documents_as_each_one_alone(name: str) -> None:
    """Documents from below one of its blocks of 128 positions to above, in rows that are no multiple of it."""
    built = model(name, APART[name] | {"max_position_embeddings": 300, "n_positions": 300})
    generator = np.random.default_rng(3)
    ids = generator.integers(4, 128, size=(2, 300))
    ids[0, [20, 210, 299]] = ids[1, [149, 150, 280]] = END
    batch = a_batch(ids, one_row=False)
    ((inputs, labels),) = batch.micro_batches(torch.device("cpu"))
    other, built.config._attn_implementation = built.config._attn_implementation, "flex_attention"
    with flex_on_cpu():
        whole = loss_and_gradients(built, label_loss_sum(built(**inputs, use_cache=False).logits, labels))
        built.eval()
        require_documents_apart(forward_of(built), built.config, torch.device("cpu"))
    built.config._attn_implementation = other
    assert_as_alone(built.train(), ids, batch, whole)


def assert_as_alone(built: PreTrainedModel, ids: np.ndarray, batch: Batch, whole: tuple[float, dict]) -> None:
    """Loss and gradients are those of every document run alone."""
    alone = torch.zeros(())
    for row, targets in zip(ids, batch.labels[0], strict=True):
        at = 0
        for document in split(row):
            logits = built(input_ids=torch.from_numpy(document).unsqueeze(0), use_cache=False).logits[0]
            wanted = targets[at : at + len(document)]
            alone = alone + functional.cross_entropy(logits, wanted, ignore_index=IGNORED_LABEL, reduction="sum")
            at += len(document)
    apart = loss_and_gradients(built, alone)
    assert whole[0] == pytest.approx(apart[0], rel=1e-5)
    assert whole[1].keys() == apart[1].keys()
    for key, gradient in whole[1].items():
        torch.testing.assert_close(gradient, apart[1][key], rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", APART)
def test_a_model_that_keeps_them_apart_is_accepted(name: str, dtype: torch.dtype) -> None:
    built = model(name, APART[name], dtype).eval()
    require_documents_apart(forward_of(built), built.config, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", LEAKING)
def test_a_model_that_attends_across_documents_is_refused(name: str, dtype: torch.dtype) -> None:
    built = model(name, LEAKING[name], dtype).eval()
    said = refused(require_documents_apart, forward_of(built), built.config, torch.device("cpu"))
    assert f"{name} does not keep packed documents apart" in said
    *_, masking, packing = re.findall(r"data\.(\w+)=(\w+)", said)
    assert (masking, packing) == (("document_masking", "false"), ("packing", "none"))


@pytest.mark.parametrize("task", ["pretrain", "sft"])
def test_with_what_is_advised_there_no_documents_are_packed(task: Any) -> None:
    advised = DataSection(document_masking=False, packing="none" if task == "sft" else "auto")
    assert not Config(task=task, data=advised).keeps_documents_apart
