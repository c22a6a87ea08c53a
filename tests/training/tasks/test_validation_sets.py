"""Validation sets and mixtures: each file has its own loss, an order that layouts and resumes keep, and its labels."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from config.errors import UserError
from data.corpora.shards import TokenShards
from data.text.tokenizer import load_tokenizer
from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.chats import write_chats, write_pairs
from tests.training.checkpoint import resume_cases
from tests.training.tasks import classify_cases, dpo_cases
from tests.training.tasks import sft_cases as cases
from tests.training.tasks.mlm_cases import mlm, write_text
from tracking.compare.surviving import read_events
from training.tasks.task import prepare

ALL = "evaluate={every_steps: 1, batches: 100}"


def sets_of(folder: Path, *names: str) -> str:
    return f"data.validation=[{', '.join(f'{{path: {folder}/{name}.jsonl, name: {name}}}' for name in names)}]"


def plain_loss(folder: Path, name: str, losses: list[tuple[float, int]], right: dict[str, dict[str, float]]) -> float:
    """Mean cross-entropy over the labels of a file of chats, one row at a time; its sum and count join `losses`, and
    the share of labels that are the likeliest tokens joins `right`."""
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    tokenizer, total, count, hits = AutoTokenizer.from_pretrained(folder / "base"), 0.0, 0, 0
    for line in (folder / f"{name}.jsonl").read_text().splitlines():
        ids, labels = cases.labelled(tokenizer, json.loads(line)["messages"])
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum"))
        hits += int((logits.argmax(-1) == labels[1:]).sum())
        count += int((labels[1:] != -100).sum())
    losses.append((total, count))
    right[name] = {"token_accuracy": hits / count}
    return total / count


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_each_set_of_chats_has_the_loss_of_plain_torch(pair, solo, folder, packing) -> None:
    for seed, name in enumerate(("easy", "hard"), 7):
        write_chats(folder / f"{name}.jsonl", 9, seed=seed)
    given = (f"data.packing={packing}", ALL)
    found = pair.run(cases.sets, folder=folder, overrides=(*given, sets_of(folder, "easy", "hard")))[0]
    losses: list[tuple[float, int]] = []
    right: dict[str, dict[str, float]] = {}
    exact = {name: plain_loss(folder, name, losses, right) for name in ("easy", "hard")}
    assert found["sets"] == pytest.approx(exact, rel=1e-5)
    assert found["metrics"] == right and found["of step"] == {}, "counted in evaluations alone"
    assert abs(exact["easy"] / exact["hard"] - 1) > 1e-4, "they differ"
    mean = sum(total for total, _ in losses) / sum(count for _, count in losses)
    assert found["whole"] == pytest.approx(mean, rel=1e-5)
    held_out = (*given, "data.validation_fraction=0.2")
    chunked = ("model.loss=chunked", "model.loss_chunk_tokens=7")
    plain = solo.run(cases.sets, folder=folder, overrides=(*held_out, *chunked))[0]
    both = solo.run(cases.sets, folder=folder, overrides=(*held_out, sets_of(folder, "easy", "hard")))[0]
    assert both["sets"] == pytest.approx({"held out": plain["whole"], **exact}, rel=1e-5)
    assert [both[key] for key in ("ids", "rows")] == [plain[key] for key in ("ids", "rows")]
    assert both["step"] == pytest.approx(plain["step"], rel=1e-6)
    both = solo.run(cases.sets, folder=folder, overrides=(*held_out, *chunked, sets_of(folder, "easy", "hard")))[0]
    assert {name: both["metrics"][name] for name in right} == right and both["step"] == plain["step"]


@pytest.mark.slow
def test_each_set_of_pairs_has_its_reference(pair: ProcessGroup, folder: Path) -> None:
    for seed, name in enumerate(("pairs", "first", "second")):
        write_pairs(folder / f"{name}.jsonl", 12, seed=seed)
    given = {"folder": folder, "compute": "bf16", "overrides": (sets_of(folder, "first", "second"), ALL)}
    found = pair.run(cases.sets, resolve=dpo_cases.resolve, **given)[0]
    assert [*found["sets"].values(), found["whole"], found["step"]] == pytest.approx([math.log(2)] * 4, abs=1e-7)
    assert found["sets"].keys() == {"first", "second"}


@pytest.mark.slow
def test_a_teacher_s_cached_answers_are_those_of_each_set(solo: ProcessGroup, folder: Path) -> None:
    write_chats(folder / "easy.jsonl", 9, seed=7)
    vocabulary = AutoConfig.from_pretrained(folder / "base").vocab_size
    given = ("task=distill", "data.format=messages", sets_of(folder, "easy").replace("name", "format: messages, name"))
    given = (*given, "data.validation_fraction=0.2", ALL)
    teacher = f"distill={{teacher: {folder}/base, ce_weight: 0.5"
    live, cached = (
        solo.run(cases.sets, folder=folder, overrides=(*given, f"{teacher}, top_k: {k}}}"))[0]["sets"]
        for k in (0, vocabulary - 1)
    )
    assert live.keys() == {"held out", "easy"}
    assert cached == pytest.approx(live, rel=1e-5)


def test_labels_are_numbered_as_in_training(solo: ProcessGroup, encoders: Path) -> None:
    """A set's rows in another order number its labels otherwise; its loss is the same."""
    lines = (encoders / "sequence.jsonl").read_text().splitlines()
    (encoders / "same.jsonl").write_text("\n".join(lines))
    first = json.loads(lines[0])["label"]
    moved = sorted(lines, key=lambda line: json.loads(line)["label"] == first)
    assert json.loads(moved[0])["label"] != first
    (encoders / "moved.jsonl").write_text("\n".join(moved))
    given = {"folder": encoders, "overrides": (sets_of(encoders, "same", "moved"), ALL)}
    found = solo.run(cases.sets, resolve=classify_cases.resolve, **given)[0]["sets"]
    assert found["moved"] == pytest.approx(found["same"], rel=1e-6)


def test_documents_may_have_sets_and_a_tokenizer_that_was_trained_on_the_data(encoders: Path, tmp_path: Path) -> None:
    write_text(tmp_path / "text", 10, seed=1)
    given: dict[str, Any] = {"folder": encoders}
    for tokenizer in ("model", "bpe:300"):
        sets = f"data.validation=[{{path: {tmp_path}/text, source: text}}]"
        more = ("data.workers=1", f"data.tokenizer={tokenizer}", f"data.cache_dir={tmp_path}/cache")
        config = classify_cases.resolve(**given, overrides=mlm(encoders, sets, *more)).config
        corpus = prepare(config, progress=False)
        assert corpus.validation_by_source.keys() == {"held out", "validation 1"}
        length = config.data.sequence_length
        parts = [part.sequences(length) for part in corpus.validation_by_source.values()]
        assert min(parts) > 0 and corpus.validation.sequences(length) == sum(parts)
        own = corpus.validation_by_source["validation 1"]
        assert isinstance(own, TokenShards)
        [ids] = own.read(np.array([0]), length)
        text = load_tokenizer(corpus.tokenizer_folder).decode(ids[:12])
        assert any(text in path.read_text() for path in (tmp_path / "text").iterdir()), text


def test_a_job_records_each_set_and_names_what_it_left_out(pair: ProcessGroup, folder: Path) -> None:
    write_chats(folder / "easy.jsonl", 9, seed=7)
    with (folder / "easy.jsonl").open("a") as file:
        long = {"role": "assistant", "content": "model " * 200}
        file.write(json.dumps({"messages": [{"role": "user", "content": "a"}, long]}) + "\n")
    overrides = resume_cases.task_job(folder, sets_of(folder, "easy"), "data.validation_fraction=0")
    overrides += ["evaluate={every_steps: 5, at_start: true}"]
    pair.run(resume_cases.job, folder=str(folder), name="sets", overrides=overrides, passes=None)
    events = list(read_events(folder / "runs" / "sets" / "events.jsonl"))
    evaluated = [event for event in events if event["event"] == "eval"]
    assert [event["by_source"] for event in evaluated] == [{"easy": event["loss"]} for event in evaluated]
    assert evaluated[0]["step"] == 0 and evaluated[1]["step"] == 5
    assert evaluated[1]["loss"] < evaluated[0]["loss"]
    recorded = json.loads((folder / "runs" / "sets" / "environment.json").read_text())["data"]
    rows = recorded["rows"]
    assert recorded["train_tokens"] == rows["tokens"] - rows["rows"] > rows["trained"], "inputs, as steps count them"
    accuracy = [event["metrics"]["token_accuracy"] for event in evaluated]
    assert 0 <= accuracy[0] <= accuracy[-1] <= 1
    said = "\n".join(prepare(cases.resolve(folder, overrides=(sets_of(folder, "easy"),)).config, progress=False).notes)
    assert "validation set easy: 9 rows in " in said and "not trained on, 1 dropped" in said


def test_a_set_without_a_row_that_fits_is_one_line(folder: Path) -> None:
    (folder / "long.jsonl").write_text(json.dumps({"prompt": "a", "completion": "model " * 300}))
    with pytest.raises(UserError, match=r"long.jsonl: no row of 1 is left.*1 dropped as longer than 97 tokens"):
        prepare(cases.resolve(folder, overrides=(sets_of(folder, "long"),)).config, progress=False)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("packing", ["best_fit", "none"])
def test_the_order_is_that_of_every_layout(pair: ProcessGroup, solo: ProcessGroup, folder: Path, packing: str) -> None:
    write_chats(folder / "more.jsonl", 40, seed=1)
    sources = f"[{{path: {folder}/chats.jsonl, weight: 3, name: a}}, {{path: {folder}/more.jsonl, weight: 1}}]"
    given = (f"data.sources={sources}", "data.path=null", "data.validation_fraction=0.2", f"data.packing={packing}")
    whole, _ = pair.run(cases.mixture, folder=folder, count=6, overrides=given)
    chunked = ("batch.micro_size=8", "model.loss=chunked", "model.loss_chunk_tokens=7")
    [alone] = solo.run(cases.mixture, folder=folder, count=6, overrides=(*given, *chunked))
    [later] = solo.run(cases.mixture, folder=folder, count=2, first=4, overrides=given)
    assert alone[:6] == whole[:6]
    assert later[:2] == whole[4:6]
    assert whole[-1]["shares"] == [0.75, 0.25]
    assert whole[-1]["losses"].keys() == {"a", "source 2"}
    assert whole[-1]["losses"] == pytest.approx(alone[-1]["losses"], rel=1e-6)
    [of_rows] = solo.run(cases.mixture, folder=folder, count=2, overrides=(*given, "sft.loss=row", *chunked))
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32).eval()
    for found, by_row in ((whole[-1], False), (alone[-1], False), (of_rows[-1], True)):
        for mine, rows in zip(found["trained"][:2], found["rows"], strict=False):
            exact = {"all": [*rows[0], *rows[1]], "a": rows[0], "source 2": rows[1]}
            means = {name: cases.mean_loss(model, own, by_row=by_row) for name, own in exact.items() if own}
            assert mine == pytest.approx(means, rel=1e-5)
        held_out = {name: cases.mean_loss(model, own, by_row=by_row) for name, own in found["held_out"].items()}
        assert found["losses"] == pytest.approx(held_out, rel=1e-5)
    labels = [sum(step["labels"][name] for step in whole[:6]) for name in ("a", "source 2")]
    assert min(labels) > 0
    if packing == "best_fit":  # padded batches of a stretch are sorted by length, so six of them tell little
        assert 0.15 < labels[1] / sum(labels) < 0.4


def test_a_job_on_a_mixture_records_each_source(pair: ProcessGroup, folder: Path) -> None:
    from tracking.compare.surviving import read_events

    write_chats(folder / "more.jsonl", 40, seed=1)
    sources = f"[{{path: {folder}/chats.jsonl, name: a}}, {{path: {folder}/more.jsonl, epochs: 2, name: b}}]"
    overrides = resume_cases.task_job(folder, f"data.sources={sources}", "data.source=stdlib", "data.path=null")
    overrides += ["data.validation_fraction=0.2", "evaluate.every_steps=5"]
    resume_cases.ends_as_whole(pair, folder, "mixed", overrides, breaks=(13,))
    events = list(read_events(folder / "runs" / "mixed" / "events.jsonl"))
    steps = [event for event in events if event["event"] == "step"]
    assert all(step["labels_by_source"].keys() == {"a", "b"} for step in steps)
    for step in steps:
        labels, losses = step["labels_by_source"], step["loss_by_source"]
        assert losses.keys() == {name for name, count in labels.items() if count}
        mean = sum(labels[name] * loss for name, loss in losses.items()) / sum(labels.values())
        assert mean == pytest.approx(step["loss"], rel=1e-6)
        assert "metrics" not in step  # it has no experts
    evals = [event for event in events if event["event"] == "eval"]
    assert [event["by_source"].keys() for event in evals] == [{"a", "b"}] * 2
