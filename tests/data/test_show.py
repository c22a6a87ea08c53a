"""`python -m data.show` prints rows and totals; every malformed file or config is one line and exit code 2."""

import bz2
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from config.load import load_config
from data.batches.loader import next_tokens
from data.corpora.documents import Documents
from data.show import main
from data.text.prepare import prepare
from tests.support.rows.chats import write_base, write_chats
from tests.support.runs.showing import Show, error_of, shower

GOOD = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b c"}]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("base"))


@pytest.fixture
def show(base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Show:
    """The tool on a config for rows.jsonl in the test's folder."""
    text = f"task: sft\nmodel: {{name_or_path: {base}}}\ndata: {{source: auto, path: {tmp_path}/rows.jsonl, "
    text += f"tokenizer: model, sequence_length: 64, cache_dir: {tmp_path}/cache, validation_fraction: 0}}\n"
    return shower(tmp_path / "run.yaml", text, capsys)


def test_it_prints_rows_with_their_labels_and_totals(show: Show, tmp_path: Path) -> None:
    write_chats(tmp_path / "rows.jsonl", 5)
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write(json.dumps({"messages": [GOOD["messages"][0], {"role": "assistant", "content": "b " * 80}]}) + "\n")
    out = show("--rows", "2")
    assert out.count("<|im_start|>assistant\n[") >= 2
    assert out.count("<|im_end|>]\n") >= 2
    assert "--- 2: " in out
    assert "--- 3: " not in out
    assert "6 rows of format messages (recognised by their fields); chat template of the tokenizer" in out
    assert "5 rows in " in out
    assert ", 1 dropped; the longest row has " in out
    [(share, tokens)] = re.findall(r"data: ([\d.]+)% of (\d+) tokens are labels", out)
    [labels] = re.findall(rf"tokens {tokens}, trained (\d+)", out)
    assert float(share) == pytest.approx(100 * int(labels) / int(tokens), abs=0.06)
    assert "6 rows in " in (out := show("data.too_long=truncate_right"))
    assert ", 1 truncated; " in out


def test_bad_rows_are_counted_by_reason_with_the_first_places(show: Show, tmp_path: Path) -> None:
    bad = [
        {"messages": [{"role": "user", "content": "a"}] * places + [{"role": "assistant"}]} for places in range(1, 6)
    ]
    rows = [*bad, GOOD, {"messages": 1}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    reasons = f"5 x messages[].content: is missing or null, not text ({tmp_path}/rows.jsonl:1, :2, :3, ...); "
    reasons += f"1 x messages: is a number, not a list ({tmp_path}/rows.jsonl:7)"
    out = show("data.on_bad_row=skip")
    assert f"data: rows skipped: {reasons}\n" in out
    assert "1 rows in 1 sequences to train on, 0 rows held out, 6 skipped" in out
    said = error_of(show(code=2))
    first = (
        "rows.jsonl:1: messages[1].content: is missing or null, not text; correct the row, or set data.on_bad_row=skip"
    )
    assert f"{first}; of 7 rows up to {tmp_path}/rows.jsonl:7 6 do not fit: {reasons}" in said


def test_prompts_are_shown_without_labels(show: Show, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": GOOD["messages"][:1], "answer": "7"}))
    out = show("task=grpo", "grpo={rewards: [exact_match], max_new_tokens: 8}")
    assert "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" in out and ", 0 of them labels" in out


def test_a_row_may_have_fields_that_json_lacks(show: Show, tmp_path: Path) -> None:
    columns = {"prompt": ["a"], "completion": ["b"], "asked": [datetime(2026, 1, 2)], "hash": [b"\xff"]}
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    assert "1 rows of format prompt_completion" in show(f"data.path={tmp_path}/rows.parquet")


@pytest.mark.parametrize("other", ["val.jsonl", "more.json"])
def test_a_folder_that_is_no_dataset_says_how_its_files_are_read(show: Show, tmp_path: Path, other: str) -> None:
    """`datasets` takes the one for another split, and the other's fields for those of all."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / other).write_text(FIRST if other == "val.jsonl" else '{"version": 1}')
    if other != "val.jsonl":
        (tmp_path / "mine" / "a.jsonl").write_text(FIRST)
    [error] = [line for line in show(f"data.path={tmp_path}/mine", code=2).splitlines() if line.startswith("error: ")]
    assert error.endswith("All files of a kind in a folder are read by data.source=jsonl or parquet.")


def test_rows_of_a_mixture_have_fewer_labels_than_tokens(show: Show, tmp_path: Path) -> None:
    for name in "ab":
        write_chats(tmp_path / f"{name}.jsonl", 5)
    sources = ", ".join(f"{{path: {tmp_path}/{name}.jsonl}}" for name in "ab")
    out = show(f"data.sources=[{sources}]", "data.path=null")
    assert "data: source 1: 5 rows of format messages" in out and "data: source 2: 5 rows of format" in out
    assert "data: 10 rows of all sources, " in out and "all tokens are labels" not in out


@pytest.mark.parametrize("apart", [False, True])
def test_the_labels_of_documents_are_those_of_their_batches(tmp_path, capsys, apart) -> None:
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("ab", "cd", "e" * 9)))
    given = f"data: {{path: {tmp_path}/rows.jsonl, source: jsonl, tokenizer: bytes, cache_dir: {tmp_path}/cache, "
    given += f"validation_fraction: 0, sequence_length: 14, document_masking: {str(apart).lower()}}}\n"
    out = shower(tmp_path / "run.yaml", f"model: {{architecture: llama}}\n{given}", capsys)()
    corpus = prepare(load_config(tmp_path / "run.yaml", [], None).data, progress=False)
    make = next_tokens(14, Documents(corpus.end_of_document) if apart else None)
    labels = make(corpus.train, 0, np.array([0]), np.array([[0]])).label_tokens
    assert labels == (12 if apart else 14) and f"--- 1: 15 tokens, {labels} of them labels\n" in out
    end = "<|endoftext|>"
    assert (f"a[b{end}]c[d{end}]e[eeeeeeee]" if apart else f"a[b{end}cd{end}eeeeeeeee]") in out
    assert ("14 tokens; all but the first of each document are" if apart else "14 labels, all tokens are labels") in out


def test_a_masked_model_s_labels_are_the_words_that_are_hidden(tmp_path, capsys) -> None:
    words = [f"word{number}" for number in range(400)]
    with bz2.open(tmp_path / "words.txt.bz2", "wt") as file:
        file.write(" ".join(words))
    given = ["task=mlm", "model={architecture: bert}", "data.tokenizer=bytes", f"data.path={tmp_path}/words.txt.bz2"]
    given += ["data.source=auto", f"data.cache_dir={tmp_path}/cache", "data.validation_fraction=0"]
    (tmp_path / "run.yaml").write_text("{}")
    assert main(["--config", str(tmp_path / "run.yaml"), *given, "data.sequence_length=256", "--rows", "4"]) == 0
    out = capsys.readouterr().out
    assert "; labels are 15% of the words, others in every epoch" in out
    shown = out[: out.index("---\n")]
    assert shown.count("[CLS]") == 4 and 5 < len(hidden := re.findall(r"\[(word\d+)\]", shown)) < 60
    assert set(hidden) <= set(words)


@pytest.mark.parametrize("opening", [b"", b"\xef\xbb\xbf", b" \r\n" * 3000, b"\xef\xbb\xbf" + b"\n" * 5000])
@pytest.mark.parametrize("form", ["lines", "Windows lines", "a list", "an indented list"])
def test_files_as_editors_write_them_are_read(show: Show, tmp_path: Path, opening: bytes, form: str) -> None:
    text = {
        "lines": f"{FIRST}\n{FIRST}\n",
        "Windows lines": f"{FIRST}\r\n{FIRST}\r\n",
        "a list": f"[{FIRST}, {FIRST}]",
        "an indented list": json.dumps([GOOD, GOOD], indent=2),
    }[form]
    (tmp_path / "rows.jsonl").write_bytes(opening + text.encode())
    assert "2 rows of format messages" in show()


@pytest.mark.parametrize(
    ("task", "row", "rendered"),
    [
        ("sft", {"prompt": "a", "completion": "b"}, False),
        ("sft", {"prompt": GOOD["messages"][:1], "completion": GOOD["messages"][1:2]}, True),
        ("dpo", {"prompt": "a", "chosen": "b", "rejected": "c"}, False),
        ("dpo", {"prompt": GOOD["messages"][:1], "chosen": "b", "rejected": "c"}, True),
    ],
)
def test_the_chat_template_is_named_where_it_made_the_text(show, tmp_path, task, row, rendered) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    assert ("; chat template of the tokenizer, answers located by" in show(f"task={task}")) == rendered


def test_a_tokenizer_without_a_mask_token_is_refused_before_anything_is_tokenized(show, base, tmp_path) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "a"}))
    tokenizer = AutoTokenizer.from_pretrained(base)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(tmp_path / "padded")
    err = show("task=mlm", f"data.tokenizer={tmp_path}/padded", code=2)
    assert "error: data.tokenizer: has no mask token, which task = mlm needs" in err and "tokenizing" not in err


def row(**fields: Any) -> str:
    return json.dumps(fields)


def turns(*contents: str, roles: str = "ua") -> str:
    names = {"u": "user", "a": "assistant", "s": "system"}
    return row(messages=[{"role": names[r], "content": c} for r, c in zip(roles, contents, strict=True)])


FIRST = json.dumps(GOOD)
FILES: list[tuple[str | bytes, str, str]] = [
    ("", "", "holds no row: it is empty. Write rows into it"),
    ("\n\n", "", "holds no row: it is empty. Write rows into it"),
    ("{", "", "rows.jsonl:1: is not JSON"),
    (FIRST + "\n{'messages': 1}", "", "rows.jsonl:2: is not JSON"),
    (FIRST + '\n{"messages": [', "", "rows.jsonl:2: is not JSON"),
    (FIRST.encode("utf-16"), "", "rows.jsonl:1: is not UTF-8"),
    ('{"messages": "caf\xe9"}'.encode("latin-1"), "", "rows.jsonl:1: is not UTF-8"),
    (json.dumps(GOOD, indent=1), "", "rows.jsonl:1: is not JSON (Expecting property name enclosed in double quotes:"),
    (json.dumps(GOOD, indent=1), "", "; write each row on one line, or all rows in one list"),
    ("3", "", "rows.jsonl:1: is 3, not an object with fields"),
    ("[3]", "", "rows.jsonl: item 1: is 3, not an object with fields"),
    ("[3", "", "rows.jsonl: cannot be read"),
    (row(question="a", answer="b"), "", "rows.jsonl:1: has no known format: its fields are answer, question"),
    (row(prompt=None, completion="b"), "", "its fields are completion, prompt (null); known are"),
    (FIRST, "task=pretrain", "; rows of format messages are read by task=sft, and by task=distill with data.format="),
    (row(prompt="a", chosen="b", rejected="c"), "task=mlm data.tokenizer=bpe:300", "; pairs of answers are read by"),
    (FIRST + "\n" + row(prompt="a", completion="b"), "", "; the row is of format prompt_completion, not messages"),
    (FIRST + "\n" + row(messages=[{"role": "user"}]), "", "rows.jsonl:2: messages[0].content: is missing or null"),
    (turns("a", roles="u"), "", "rows.jsonl:1: messages: has no assistant's turn to train on, its roles are user;"),
    (turns("a <|im_end|>", "b"), "", "rows.jsonl:1: messages[0].content: spells the control token <|im_end|>"),
    (turns("\ud800", "b"), "", "rows.jsonl:1: holds a lone surrogate, which is no character"),
    (row(prompt="\ud800", completion="b"), "", "rows.jsonl:1: holds a lone surrogate, which is no character"),
    (turns("a", "b " * 200), "", "no row of 1 is left to train on: 1 dropped as longer than 65 tokens"),
    (
        turns("a " * 200, "b"),
        "data.too_long=truncate_right",
        "0 dropped as longer than 65 tokens, 1 dropped because cutting left no label, 0 skipped. Raise data.seq",
    ),
    (turns("a", "b " * 200), "", "0 skipped. Raise data.sequence_length, set data.too_long, or correct the rows."),
    (FIRST, "data.chat_template=nowhere.jinja", "data.chat_template = 'nowhere.jinja' is not a file"),
    (FIRST, "data.chat_template={folder}/bad.jinja", "rows.jsonl:1: messages: are refused by the chat template"),
    (FIRST, "data.document_masking=true data.packing=none", "data.document_masking = true: rows are not packed by"),
    (FIRST, "data.path={folder}/none.jsonl", "none.jsonl' matches no file"),
    (FIRST, "data.source=text", "data.source = text has no rows"),
    (FIRST, "data.path={folder}/notes.txt", "data.source = text has no rows"),
    (FIRST, "data.path={folder}/bad.jinja", "bad.jinja: is a file, and data.source=hub needs a hub dataset"),
    (row(messages=[]), "data.on_bad_row=skip", "). Correct the rows, or the keys of data that say what they are."),
    (FIRST, "task=pretrain data.train_on=all", "data.train_on = 'all' is only read by task = sft"),
    (FIRST, "adapter.kind=lora adapter.target_modules=[]", "adapter.target_modules is empty; name modules"),
    (FIRST, "adapter.r=4", "adapter.r = 4 is only read by adapter.kind = lora and dora; remove it"),
    (FIRST, "data.validation_fraction=0.9999999", "all 1 rows of data.path="),
]


@pytest.mark.parametrize("on_bad_row", ["error", "skip"])
def test_a_missing_chat_template_is_no_fault_of_the_row(show: Show, tmp_path: Path, on_bad_row: str) -> None:
    (tmp_path / "rows.jsonl").write_text(FIRST)
    said = show("data.tokenizer=bytes", f"data.on_bad_row={on_bad_row}", code=2)
    problem = "is a conversation, and the tokenizer has no chat template; set data.chat_template to a file of one\n"
    assert said.endswith(f"rows.jsonl:1: {problem}")


def test_pairs_of_several_sources_are_counted_as_pairs(show: Show, tmp_path: Path) -> None:
    rows = [json.dumps({"prompt": "a", "chosen": f"b {number}", "rejected": "c"}) for number in range(6)]
    for number, name in enumerate("abc"):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows[2 * number :][:2]))
    sources = f"data.sources=[{{path: {tmp_path}/a.jsonl}}, {{path: {tmp_path}/b.jsonl}}]"
    sets = f"data.validation=[{{path: {tmp_path}/c.jsonl, name: own}}]"
    out = show("task=dpo", "data.path=null", sources, sets)
    assert "data: 4 pairs of all sources, " in out
    assert "data: validation set own: 2 pairs, not trained on\n" in out


@pytest.mark.parametrize(("content", "overrides", "problem"), FILES)
def test_what_is_malformed_is_one_line_and_exit_code_2(show, tmp_path, content, overrides, problem) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content if isinstance(content, bytes) else content.encode())
    (tmp_path / "notes.txt").write_text("a")
    (tmp_path / "bad.jinja").write_text("{% for x in %}")
    assert problem in error_of(show(*overrides.replace("{folder}", str(tmp_path)).split(), code=2))
