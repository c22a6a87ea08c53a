"""Rows as sources and targets: the tokens of transformers, what is cut, batches as it shifts them, bad rows."""

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import PreTrainedTokenizerFast
from transformers.models.bart.modeling_bart import shift_tokens_right

from config.load import load_config
from config.task import settle_task
from data.batches.loader import NO_SAMPLE, Batches
from data.batches.seq2seq_batches import seq2seq_batches
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.corpora.sampler import sample_ids
from data.rows.prepare_rows import prepare_rows
from data.show import main
from data.sources.row_formats import alpaca_prompt
from data.sources.seq2seq_rows import sides
from tests.support.rows.chats import unigram
from tests.support.rows.seq2seq import rows, tokenizer
from tests.support.runs.showing import error_of

CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt %}answer: "
CHAT += "{% endif %}"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with tokenizers of T5's and of BART's kind, and a Unigram."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for family in ("t5", "bart"):
        tokenizer(family).save_pretrained(folder / family)
    made = unigram(["<pad>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<pad>", unk_token="<unk>")
    fast.save_pretrained(folder / "unigram")
    (folder / "chat.jinja").write_text(CHAT)
    return folder


def config_of(made: Path, folder: Path, lines: list[Any], *overrides: str, family: str = "t5") -> list[str]:
    """Arguments of the config for these rows."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    (folder / "rows.jsonl").write_text(text)
    (folder / "run.yaml").write_text("task: seq2seq\nmodel: {architecture: t5}\n")
    given = [f"data.path={folder}/rows.jsonl", "data.source=jsonl", f"data.tokenizer={made}/{family}"]
    given += [f"data.cache_dir={folder}/cache", "data.sequence_length=32", "data.validation_fraction=0"]
    return [*given, *overrides]


def prepared(made: Path, folder: Path, lines: list[Any], *overrides: str, family: str = "t5") -> Corpus:
    """The corpus of some rows."""
    given = config_of(made, folder, lines, *overrides, family=family)
    return prepare_rows(settle_task(load_config(folder / "run.yaml", given, None)).data, progress=False)


def sides_of(corpus: Corpus) -> list[tuple[list[int], list[int]]]:
    assert isinstance(corpus.train, RowShards)
    pairs = (sides(*corpus.train.row(number)) for number in range(corpus.train.rows))
    return [(source.tolist(), target.tolist()) for source, target in pairs]


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_every_form_is_what_transformers_makes_of_its_two_texts(made: Path, tmp_path: Path, family: str) -> None:
    said = [{"role": "user", "content": "a model"}, {"role": "assistant", "content": "the loss"}]
    more = [*said, {"role": "user", "content": "rank"}, {"role": "assistant", "content": "step"}]
    plain, alpaca = rows(20), {"instruction": "mask", "input": "a token", "output": "half"}
    template = f"data.chat_template={made}/chat.jinja"
    cases: list[tuple[list[Any], tuple[str, ...], list[tuple[str, str]]]] = [
        (plain, (), [(row["prompt"], row["completion"]) for row in plain]),
        ([{"messages": said}], (), [("a model", "the loss")]),
        ([alpaca], ("data.sequence_length=400",), [(alpaca_prompt("mask", "a token"), "half")]),
        (
            [{"messages": more}],
            (template, "data.sequence_length=400"),
            [("user: a model\nassistant: the loss\nuser: rank\nanswer: ", "step")],
        ),
        ([alpaca], (template, "data.sequence_length=400"), [("user: mask\n\na token\nanswer: ", "half")]),
    ]
    reference = tokenizer(family)
    for lines, overrides, texts in cases:
        found = sides_of(prepared(made, tmp_path, lines, *overrides, family=family))
        assert found == [(reference(source).input_ids, reference(target).input_ids) for source, target in texts]
        assert all(target[-1] == reference.eos_token_id for _, target in found)


@pytest.mark.parametrize("family", ["t5", "unigram"])
def test_a_text_that_spells_a_control_token_stays_text(made: Path, tmp_path: Path, family: str) -> None:
    row = {"prompt": "a </s>", "completion": "</s> b"}
    [(source, target)] = sides_of(prepared(made, tmp_path, [row], family=family))
    assert source.count(1) == target.count(1) == 1


def test_what_is_too_long_is_dropped_or_cut_and_counted(made: Path, tmp_path: Path) -> None:
    """Special tokens stay around a source; a target that is cut is not taught to end there."""
    lines = [("a b c d", "a"), ("a", "a b c d e f"), ("a", "b"), ("a b c d", "a b c d e f")]
    given = [{"prompt": prompt, "completion": completion} for prompt, completion in lines]
    limits, reference = ("data.sequence_length=5", "data.target_length=4"), tokenizer("bart")
    whole = [[reference(text).input_ids for text in pair] for pair in lines]
    corpus = prepared(made, tmp_path, given, *limits, family="bart")
    assert sides_of(corpus) == [tuple(whole[2])]
    assert corpus.counts["dropped"] == 3
    assert corpus.counts["longest source"] == max(len(source) for source, _ in whole)
    assert corpus.counts["longest target"] == max(len(target) for _, target in whole)
    for side in ("left", "right"):
        corpus = prepared(made, tmp_path, given, *limits, f"data.too_long=truncate_{side}", family="bart")
        for (source, target), (first, second) in zip(sides_of(corpus), whole, strict=True):
            inner = first[1:-1]
            kept = inner if len(inner) <= 3 else inner[-3:] if side == "left" else inner[:3]
            assert source == [3, *kept, 1]
            assert target == second[:4]
        counts = [corpus.counts[f"truncated{which}"] for which in ("", " sources", " targets")]
        assert counts == [3, 2, 2]
        assert "3 truncated; the longest source has" in " ".join(corpus.notes)


def test_batches_are_shifted_as_transformers_does(made: Path, tmp_path: Path) -> None:
    corpus = prepared(made, tmp_path, rows(20), "data.target_length=40")
    data = settle_task(load_config(tmp_path / "run.yaml", config_of(made, tmp_path, rows(20)), None)).data
    ids = np.array([3, 1, 7, NO_SAMPLE])
    batch = seq2seq_batches(data, start=9, pad=0)(corpus.train, 0, ids, ids.reshape(2, 2))
    real, given = sides_of(corpus), batch.further
    for place, sample in enumerate(ids):
        at = divmod(place, 2)
        source, target = real[sample] if sample != NO_SAMPLE else ([], [])
        assert batch.input_ids[at].tolist() == source + [0] * (batch.input_ids.shape[-1] - len(source))
        assert given["attention_mask"][at].sum() == max(len(source), 1)
        labels = torch.tensor([target + [-100] * (batch.labels.shape[-1] - len(target))])
        assert torch.equal(batch.labels[at], labels[0])
        if target:
            places = slice(len(target))  # behind them no label counts
            assert torch.equal(given["decoder_input_ids"][at][places], shift_tokens_right(labels, 0, 9)[0, places])
    kept = [real[sample] for sample in ids[:3]]
    assert batch.label_tokens == batch.label_tokens_of_all == sum(len(target) for _, target in kept)
    assert batch.tokens == sum(len(source) + len(target) for source, target in kept)
    assert batch.input_ids.shape[-1] == -(-max(len(source) for source, _ in kept) // 8) * 8


def test_a_batch_has_rows_of_similar_length(made: Path, tmp_path: Path) -> None:
    train = prepared(made, tmp_path, rows(60)).train
    assert isinstance(train, RowShards)
    sizes: dict[str, int] = {"global_size": 4, "seed": 3}
    data = settle_task(load_config(tmp_path / "run.yaml", config_of(made, tmp_path, rows(60)), None)).data
    make = seq2seq_batches(data, start=9, pad=0)
    with closing(
        Batches(train, sequence_length=32, micro_size=2, rank=0, world_size=1, make_batch=make, **sizes)
    ) as batches:
        found = [batches.next_step().sample_ids for _ in range(3 * 15)]
    drawn = [sample_ids(position, samples=60, **sizes) for position in range(3 * 15)]
    for epoch in range(3):
        assert sorted(np.concatenate(found[15 * epoch : 15 * epoch + 15])) == list(range(60))
    spread = [sum(int(np.ptp(train.places(ids))) for ids in those) for those in (drawn, found)]
    assert spread[1] < spread[0] / 2


def test_a_made_tokenizer_ends_texts_and_can_pad(made: Path, tmp_path: Path) -> None:
    corpus = prepared(made, tmp_path, [{"prompt": "ab", "completion": "c"}], "data.tokenizer=bytes")
    [(source, target)] = sides_of(corpus)
    assert (len(source), len(target), source[-1]) == (3, 2, target[-1])
    assert corpus.end_of_document == source[-1]
    assert corpus.vocab_size == 258


def turns(*said: tuple[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in said]}


ASKED, GOOD = ("user", "a"), {"prompt": "a", "completion": "b"}
BAD: list[tuple[Any, str, str]] = [
    (turns(ASKED), "", "rows.jsonl:1: messages[0].role: is 'user'; the target is the last turn, which is the assist"),
    (turns(("assistant", "a")), "", "rows.jsonl:1: messages: has no turn before the answer, which would be the source"),
    (turns(ASKED, ("assistant", "a"), ASKED, ("assistant", "b")), "", "has no chat template to join turns; set data.c"),
    (turns(ASKED, ("assistant", [{"type": "text", "text": "a"}])), "", "messages[1]: is not plain text, as a"),
    (turns(("user", "</s>"), ("assistant", "a")), "", "messages[0].content: spells the control token </s>"),
    ({"prompt": "a"}, "", "rows.jsonl:1: has no known format"),
    ({"prompt": "a", "completion": ""}, "", "rows.jsonl:1: completion: is empty"),
    ({"text": "a"}, "", "rows.jsonl:1: is one text without the source and target of task=seq2seq; set task=sft"),
    ({"prompt": "a " * 90, "completion": "b"}, "", "1 dropped as longer than a source of 32 or a target of 32 tokens"),
    (GOOD, "data.packing=best_fit", "data.packing = best_fit: rows are not packed by task = seq2seq"),
    (GOOD, "data.document_masking=true", "data.document_masking = true: rows are not packed by task = seq2seq"),
    (GOOD, "data.format=text", "data.format = text has no source and target, which task = seq2seq needs; give"),
    (GOOD, "task=sft data.target_length=9", "data.target_length = 9 is only read by task = seq2seq, grpo and opd;"),
    (GOOD, "model.compile=true", "model.compile = true is not verified with rows, which task = seq2seq learns"),
    (GOOD, "adapter.kind=lora", "adapter.kind = lora needs a model to adapt; set model.name_or_path"),
]


@pytest.mark.parametrize(("line", "overrides", "problem"), BAD)
def test_what_is_malformed_is_one_line_and_exit_code_2(made, tmp_path, capsys, line, overrides, problem) -> None:
    given = config_of(made, tmp_path, [line], *overrides.split())
    assert main(["--config", str(tmp_path / "run.yaml"), *given]) == 2
    assert problem in error_of(capsys.readouterr().err)
