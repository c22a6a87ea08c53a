"""Encoders on several sources: one numbering of their labels, and each source's own labels and loss."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer

from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.labelled import write_rows
from tests.training.tasks import classify_cases as cases
from tests.training.tasks import mlm_cases, sft_cases
from training.tasks.task import prepare

OTHER = ("new", "odd", "good")
"""Labels of the second source: one of its own, in another order."""


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", ["sequence", "token", "regression"])
def test_each_source_has_its_loss_under_one_numbering(
    pair: ProcessGroup, solo: ProcessGroup, encoders: Path, kind: str
) -> None:
    second = write_rows(encoders / f"{kind}-second.jsonl", kind, 40, seed=1, pair=kind != "token", labels=OTHER)
    sources = f"[{{path: {encoders}/{kind}.jsonl, name: a}}, {{path: {second}, name: b}}]"
    given = ("data.path=null", f"data.sources={sources}")
    [alone] = solo.run(cases.mixture, folder=encoders, kind=kind, overrides=given)
    found, _ = pair.run(cases.mixture, folder=encoders, kind=kind, overrides=given)
    for key in ("loss", "loss_by_source"):
        assert found[key] == pytest.approx(alone[key], rel=1e-6)
    assert found["labels_by_source"] == found["counts_by_source"] == alone["counts_by_source"]
    names = ["number"] if kind == "regression" else ["bad", "good", "new", "odd"]
    assert kind == "regression" or found["names"] == names
    net: Any = getattr(transformers, cases.AUTO[kind]).from_pretrained(encoders / "bert", num_labels=len(names))
    net = sft_cases.trained_from(net, found["before"], None).eval()
    tokenizer = AutoTokenizer.from_pretrained(encoders / "bert")
    total, count = 0.0, 0
    for name, path in (("a", encoders / f"{kind}.jsonl"), ("b", second)):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        mine = [int(s) for s in found["samples"][1] if (s >= found["first"]) == (name == "b")]
        losses, labels = 0.0, 0
        for number in mine:
            row = rows[number - (found["first"] if name == "b" else 0)]
            inputs, target = cases.example(tokenizer, row, kind, names, pair=False)
            with torch.no_grad():
                logits = net(**inputs).logits.float()
            if kind == "regression":
                losses, labels = losses + float((logits.view(()) - target) ** 2), labels + 1
            else:
                logits = logits.reshape(-1, len(names))
                losses += float(cross_entropy(logits, target, ignore_index=-100, reduction="sum"))
                labels += int((target != -100).sum())
        assert labels == found["labels_by_source"][name] > 0
        assert found["loss_by_source"][name] == pytest.approx(losses / labels, rel=1e-5)
        total, count = total + losses, count + labels
    assert found["loss"] == pytest.approx(total / count, rel=1e-5)


def test_a_masked_language_model_counts_what_is_hidden_of_each_source(
    pair: ProcessGroup, solo: ProcessGroup, encoders: Path
) -> None:
    if not (encoders / "more").exists():
        mlm_cases.write_text(encoders / "more", 10, seed=1)
    sources = f"[{{path: {encoders}/text, source: text, name: a}}, {{path: {encoders}/more, source: text, name: b}}]"
    given = (*mlm_cases.mlm(encoders), "data.path=null", f"data.sources={sources}", "data.workers=1")
    prepare(cases.resolve(encoders, overrides=given).config, progress=False)  # which starts processes
    [found] = solo.run(cases.mixture, folder=encoders, overrides=given)
    both, _ = pair.run(cases.mixture, folder=encoders, overrides=given)
    assert both["counts_by_source"] == found["counts_by_source"]
    assert both["loss_by_source"] == pytest.approx(found["loss_by_source"], rel=1e-6)
    assert found["held out"].keys() == {"a", "b"}
    [(seen, labels, owners)] = found["seen"]
    net = transformers.AutoModelForMaskedLM.from_pretrained(encoders / "bert")
    net = sft_cases.trained_from(net, found["before"], None).eval()
    for number, name in enumerate(("a", "b")):
        mine = owners == number
        assert found["counts_by_source"][name] == int((labels[mine] != -100).sum()) > 0
        with torch.no_grad():
            logits = net(input_ids=seen[mine]).logits.flatten(0, 1)
        exact = float(cross_entropy(logits, labels[mine].flatten(), ignore_index=-100))
        assert found["loss_by_source"][name] == pytest.approx(exact, rel=1e-5)
