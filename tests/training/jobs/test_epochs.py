"""run.epochs: the steps it makes, each row once an epoch, over a resume; memory and files do not grow with them."""

import dataclasses
import json
import re
import tracemalloc
from contextlib import closing, suppress
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.load import load_config
from config.schema import (
    BatchSection,
    Config,
    DataSection,
    GrpoSection,
    GuardSection,
    RunSection,
    ScheduleSection,
    SourceSection,
)
from data.batches.loader import Batches, sample_ids_sha256
from data.batches.preference_batches import batches_of_pairs, lengths_of_corpus
from data.corpora.mixture import Mixture
from data.corpora.sampler import sample_ids
from launch.canary.plan import read_plan
from launch.plan.command import main
from precision.guard import Guard, Judgement, Verdict
from precision.manifest import Manifest, Rule
from precision.regions import Regions
from precision.step_health import Health
from tests.support.jobs.launches import command, events, finish
from tests.support.models.small_models import small_model
from tests.support.rows.chats import write_base, write_chats, write_pairs
from tools.parity.jobs import plan
from tracking.compare.surviving import read_events
from training.tasks.shape import settle_steps
from training.tasks.task import prepare


def corpus_of(*sizes: int) -> Any:
    """A corpus of which only the number of samples is known, by source."""
    mixture = Mixture(tuple(map(str, sizes)), sizes, tuple(map(float, sizes))) if len(sizes) > 1 else None
    return SimpleNamespace(mixture=mixture, train=SimpleNamespace(sequences=lambda length: sum(sizes)))


def config_of(epochs: float, size: int, **further: Any) -> Config:
    model = dataclasses.replace(Config().model, architecture="llama")
    return Config(
        **{"run": RunSection(epochs=epochs, steps=0), "batch": BatchSection(global_size=size), "model": model} | further
    )


@pytest.mark.parametrize(
    ("epochs", "rows", "size", "steps"),
    [(1, 112, 16, 7), (2, 43, 8, 11), (1, 1, 512, 1), (1.1, 100, 10, 11), (0.1, 1000, 10, 10), (0.01, 10, 16, 1)],
)
def test_an_epoch_is_all_rows_and_the_last_batch_is_filled(epochs: float, rows: int, size: int, steps: int) -> None:
    config = settle_steps(config_of(epochs, size), corpus_of(rows))
    assert (config.run.steps, config.scheduled_steps) == (steps, steps)
    seen = np.concatenate([sample_ids(at, samples=rows, seed=0, global_size=size) for at in range(steps)])
    assert np.bincount(seen, minlength=rows).min() >= int(Fraction(str(epochs)))
    assert settle_steps(config, corpus_of(rows)) == config, "as the run recorded it"


@pytest.mark.parametrize(
    ("first", "second", "steps"), [({}, {}, 20), ({"epochs": 3}, {}, 23), ({"weight": 9}, {"weight": 1}, 20)]
)
def test_an_epoch_of_a_mixture_has_each_source_as_often_as_it_says(first: Any, second: Any, steps: int) -> None:
    given = {"a": first, "b": second}
    sources = tuple(SourceSection(name=name, path="x", source="hub", **rest) for name, rest in given.items())
    config = config_of(2, 10, data=DataSection(sources=sources, tokenizer="bytes"))
    assert settle_steps(config, corpus_of(7, 93)).run.steps == steps  # 2 (3 x 7 + 93) / 10, or 2 (7 + 93) / 10


def test_an_epoch_of_prompts_has_several_updates_for_each_batch() -> None:
    grpo = GrpoSection(rewards=("exact_match",), group_size=4, updates=3)
    data = DataSection(source="jsonl", path=__file__, tokenizer="bytes")
    config = settle_steps(config_of(2, 16, task="grpo", grpo=grpo, data=data), corpus_of(43))
    assert config.run.steps == 66  # 22 batches of 4 prompts


def test_what_contradicts_the_epochs_is_one_line() -> None:
    said = "run.epochs = 2 is 11 steps, of 43 samples an epoch"
    with pytest.raises(UserError, match=f"^run.steps = 12: {said} in batches of 8; give one of the two$"):
        settle_steps(config_of(2, 8, run=RunSection(epochs=2, steps=12)), corpus_of(43))
    with pytest.raises(UserError, match=f"^{said}: schedule.warmup_steps = 12 is more than run.steps = 11; make it"):
        settle_steps(config_of(2, 8, schedule=ScheduleSection(warmup_steps=12)), corpus_of(43))


def test_tools_that_plan_with_steps_learn_them_from_the_data(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    write_base(tmp_path / "base")
    write_chats(tmp_path / "chats.jsonl", 43)
    path = tmp_path / "run.yaml"
    data = f"{{source: auto, path: {tmp_path}/chats.jsonl, cache_dir: {tmp_path}/cache, tokenizer: model}}"
    path.write_text(
        f"task: sft\nmodel: {{name_or_path: {tmp_path}/base}}\ndata: {data}\nrun: {{epochs: 4, dir: {tmp_path}/runs}}\n"
        "canary: {data_share: 0.5}\n"
    )
    given = ["data.validation_fraction=0", "batch.global_size=8", "precision.compute=fp32", "data.packing=none"]
    parity = plan(str(path), given, folder=tmp_path / "parity", processes=1)
    assert (parity.resolved.config.run.steps, len(parity.points)) == (22, 2)
    canary = read_plan(str(path), given, processes=1, launch=(), check_launch=())
    assert (canary.steps, canary.resolved.config.run.steps) == (11, 22)
    assert "run.steps=22" in canary.whole_command([], "never")
    canary = read_plan(str(path), [*given, "run.epochs=2"], processes=1, launch=(), check_launch=())
    config = read_command_line([*canary.arguments, *canary.first_steps], as_launched(1)).config
    assert (config.run.epochs, config.run.steps, canary.resolved.config.run.steps) == (None, 6, 11)
    parity = plan(str(path), [*given, "run.epochs=2"], folder=tmp_path / "parity", steps=3, processes=1)
    assert (parity.resolved.config.run.epochs, parity.resolved.config.run.steps) == (None, 3)
    with suppress(SystemExit, UserError):
        main(["--config", str(path), "--gpus", "1", *given])
    assert "run.epochs = 4: the number of steps is known once the data are prepared; give" in capsys.readouterr().err


@pytest.mark.slow
def test_each_pair_comes_once_an_epoch_over_a_resume_on_fewer_ranks(tmp_path: Path) -> None:
    """There are 43 pairs in batches of 8: the job stops after step 6, in which the first epoch ends."""
    write_base(tmp_path / "base")
    write_pairs(tmp_path / "pairs.jsonl", 43)
    job = [f"model={{name_or_path: {tmp_path}/base, architecture: null, config: {{}}}}", "task=dpo", "data.source=auto"]
    job += ["schedule.warmup_steps=0", "adapter={kind: lora, r: 2}", f"data.path={tmp_path}/pairs.jsonl"]
    job += ["data.sequence_length=96", "run.steps=null"]
    job += ["data.tokenizer=model", "data.validation_fraction=0", "evaluate.every_steps=null", "generate.tokens=0"]
    assert re.search("step +6/6 ", finish(command("python", tmp_path, "it", *job, "run.epochs=1"), ranks=2))
    finish(command("python", tmp_path, "it", *job, "run.epochs=2"))
    finish(command("python", tmp_path, "whole", *job, "run.epochs=2"))
    hashes = [[event["sample_ids_sha256"] for event in events(tmp_path, run, "step")] for run in ("it", "whole")]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == len(hashes[0]) == 11
    opening = [*read_events(tmp_path / "runs/it/events.jsonl")][:2]
    assert [event["event"] for event in opening] == ["run_start", "note"]
    epochs = [event["step"] for event in events(tmp_path, "it", "note") if event["text"].startswith("run.epochs")]
    assert epochs == [0, 6], "after each session's start, at its step"
    recorded = load_config(tmp_path / "runs/it/config.yaml", [], None)
    assert (recorded.run.steps, recorded.run.epochs) == (11, 2.0)
    corpus = prepare(recorded, progress=False)
    sizes: dict[str, int] = {"global_size": 8, "micro_size": 8, "rank": 0, "world_size": 1}
    make, length = batches_of_pairs(lengths_of_corpus(corpus)), recorded.data.sequence_length
    with closing(Batches(corpus.train, sequence_length=length, seed=0, make_batch=make, **sizes)) as batches:
        taken = [batches.next_step().sample_ids for _ in hashes[0]]
    assert [sample_ids_sha256(ids) for ids in taken] == hashes[0]
    stream = np.concatenate(taken)
    assert [sorted(stream[first : first + 43]) for first in (0, 43)] == 2 * [[*range(43)]]
    refused = finish(command("python", tmp_path, "it", *job, "run.epochs=2", "run.steps=5"), exit_code=2)
    assert re.search(
        r"error: run.steps = 5: run.epochs = 2 is 11 steps, of 43 samples .*; give one of the two", refused
    )


MANIFEST = Manifest("bf16", (Rule("fp16", "to have one", "*.q_proj"),), Path("a manifest"))


def healthy(step: int) -> Health:
    return Health(step=step, loss=2 + 1 / step, grad_norm=1 + 1 / step)


def test_what_the_guard_saves_does_not_grow_once_its_window_is_full() -> None:
    """Incidents occur on the way, as many as their budgets allow."""
    guard, sizes = Guard(GuardSection(spike_sigmas=6.0)), {}
    for step in range(1, 2001):
        refused = step % 100 == 0 and guard.used["skip"] < GuardSection().skip_budget
        judgement = Judgement(Verdict.SKIP, "a test") if refused else Judgement(Verdict.STEP)
        guard.note(healthy(step), judgement, applied=not refused)
        sizes[step] = len(re.sub(r"\d+(\.\d+)?", "0", json.dumps(guard.state_dict())))
    assert sizes[20] < sizes[150] == sizes[2000] < 2000


def test_regions_that_change_to_and_fro_leave_nothing_behind() -> None:
    """Telemetry's probe changes all of them, twice each time."""
    regions = Regions(small_model("llama", num_hidden_layers=4), MANIFEST)

    def to_and_fro(times: int) -> None:
        for _ in range(times):
            for name, compute in regions.dtypes.items():
                regions.set(name, "fp32")
                regions.set(name, compute)

    to_and_fro(2)
    tracemalloc.start()
    to_and_fro(50)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 20_000, f"{held} bytes"
