"""A mixture's order is the same at every layout and after a resume; each source has its labels and its own loss."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.jobs.process_group import ProcessGroup
from tests.support.rows.chats import write_chats
from tests.training.checkpoint import resume_cases
from tests.training.tasks import sft_cases as cases


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
