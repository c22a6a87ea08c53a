"""The oracle computes what runs record, by rules of its own, and names what a run does otherwise."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from config.cli import REPOSITORY
from config.schema import LossScaleSection, ScheduleSection
from data.sampler import permute
from precision.loss_scale import make_policy
from tests.support.chats import LENGTH, write_base, write_chats
from tests.support.launches import command, finish
from training.parity.gate import main
from training.parity.oracle.judge import Judged, judge
from training.parity.oracle.rules import loss_scale, permuted, schedule
from training.schedule import learning_rate

SLOW = pytest.mark.slow
MANIFEST = ("precision.path=manifest", "precision.manifest=config/manifests/bf16.json")
APART = ("data.document_masking=true", "batch.micro_size=1", "run.steps=4", "data.source=jsonl")
"""Micro-batches with different numbers of labels: of short documents that are kept apart."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, draw = tmp_path_factory.mktemp("oracle"), random.Random(5)
    texts = ["".join(draw.choices("abcd ", k=draw.randint(1, 40))) for _ in range(600)]
    (made / "short.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return made


def judged(folder: Path, name: str, *overrides: str, mistake: str = "") -> Judged:
    """A small job of two ranks and what the oracle says of it."""
    if "data.source=jsonl" in overrides:
        overrides = (*overrides, f"data.path={folder}/short.jsonl")
    line = command("python", folder, name, "evaluate.every_steps=0", "generate.tokens=0", *overrides)
    if mistake:
        line[1:2] = [str(REPOSITORY / "tests/support/wrong_train.py"), mistake]
    finish(line, ranks=2)
    return judge(folder / "runs" / name)


def failed(found: Judged) -> set[str]:
    return {each.what for each in found.comparisons if not each.holds}


def test_a_run_in_fp32_is_what_it_computes(finished: Path) -> None:
    found = judge(finished / "runs/it")
    assert found.holds and found.steps == 6
    assert found.notes == ["masters compared: step 4", "masters compared: step 6"]
    largest = {each.what: each.largest for each in found.comparisons}
    assert largest["samples"] == largest["tokens"] == 0
    assert largest["masters"] < 5e-5 and largest["loss"] < 1e-6


@pytest.mark.parametrize(
    "overrides",
    [
        (*APART, "deepspeed.stage=3", "optimizer.gradient_clipping=0.05"),
        pytest.param(("precision.compute=bf16", "deepspeed.stage=2"), id="bf16", marks=SLOW),
        pytest.param(("precision.compute=fp32", *MANIFEST, "deepspeed.stage=2"), id="manifest"),
        pytest.param(("precision.compute=fp16", "deepspeed.stage=1"), id="fp16", marks=SLOW),
        pytest.param(
            ("optimizer.name=sgd", "optimizer.groups=[{match: '*mlp*', learning_rate: 0.1, weight_decay: 0.3}]"),
            id="sgd",
            marks=SLOW,
        ),
    ],
)
def test_so_are_runs_of_other_configs(folder: Path, overrides: tuple[str, ...]) -> None:
    found = judged(folder, f"right-{abs(hash(overrides))}", "deepspeed.config=null", *overrides)
    assert found.holds, found.lines()


@pytest.mark.parametrize(("packing", "loss"), [("best_fit", "row"), pytest.param("none", "token", marks=SLOW)])
def test_so_are_runs_on_chats(folder: Path, packing: str, loss: str) -> None:
    base, rows = write_base(folder / f"base-{packing}"), write_chats(folder / f"{packing}.jsonl", 80)
    data = f"data={{source: auto, path: {rows}, tokenizer: model, sequence_length: {LENGTH}, packing: {packing}}}"
    model = ("model.architecture=null", "model.config={}", f"model.name_or_path={base}")
    found = judged(folder, f"chats-{packing}", "task=sft", f"sft.loss={loss}", *model, data)
    assert found.holds, found.lines()


@pytest.mark.parametrize(
    ("mistake", "named"),
    [
        ("late_rate", {"learning rate", "masters", "distance moved"}),
        ("mean_of_means", {"norm", "masters"}),
        pytest.param("swapped_batches", {"samples"}, marks=SLOW),
    ],
)
def test_a_mistake_that_both_twins_of_a_gate_would_share_is_named(folder: Path, mistake: str, named: set[str]) -> None:
    found = judged(folder, mistake, *APART, mistake=mistake)
    assert failed(found) >= named, found.lines()


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5), st.integers(1, 3))
def test_both_loss_scales_are_one(overflows: list[bool], window: int, hysteresis: int) -> None:
    section = LossScaleSection(initial=256.0, window=window, hysteresis=hysteresis, minimum=16.0, maximum=1024.0)
    scale, policy = loss_scale(section), make_policy(section)
    assert scale is not None
    for overflow in overflows:
        assert scale(overflow) == policy.scale
        policy.update(overflow)


def tampered(finished: Path, folder: Path, change: Callable[[dict[str, Any]], None]) -> Judged:
    run = shutil.copytree(finished / "runs/it", folder / "it")
    lines = []
    for text in (run / "events.jsonl").read_text(encoding="utf-8").splitlines():
        event = json.loads(text)
        if event["event"] == "step" and event["step"] == 2:
            change(event)
        lines.append(json.dumps(event))
    (run / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return judge(run)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda event: event.update(loss=event["loss"] * (1 + 1e-5)), "loss"),
        (lambda event: event.update(grad_norm=event["grad_norm"] * 1.0001), "norm"),
        (lambda event: event.update(tokens=event["tokens"] - 1), "tokens"),
        (lambda event: event.update(loss=float("nan")), "loss"),
    ],
)
def test_a_wrong_record_is_named(
    finished: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None], named: str
) -> None:
    found = tampered(finished, tmp_path, change)
    assert failed(found) == {named}
    assert found.lines()[-1] == f"6 steps differs from the oracle in: {named}"


@example("linear", 1, 0.0, 1.0, 2)
@given(
    st.sampled_from(["cosine", "linear", "wsd", "constant"]),
    st.integers(0, 12),
    st.floats(0.0, 1.0),
    st.floats(0.01, 1.0),
    st.integers(1, 60),
)
def test_both_schedules_are_one(name: Any, warmup: int, ratio: float, decay: float, total: int) -> None:
    section = ScheduleSection(name=name, warmup_steps=warmup, final_ratio=ratio, decay_fraction=decay)
    rate = schedule(section, peak=0.3, total=total)
    for applied in range(total):
        expected = learning_rate(section, peak=0.3, applied=applied, total=total)
        assert rate(applied) == pytest.approx(expected, rel=1e-12, abs=1e-15)


@given(st.integers(1, 5000), st.integers(0, 2**31), st.integers(0, 9), st.data())
def test_both_orders_are_one(samples: int, seed: int, epoch: int, data: st.DataObject) -> None:
    index = data.draw(st.integers(0, samples - 1))
    expected = permute(np.array([index]), samples=samples, seed=seed, epoch=np.array([epoch]))
    assert permuted(index, samples=samples, seed=seed, epoch=epoch) == expected[0]


def test_the_command_line(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(finished / "runs/it")
    assert main(["--oracle", run, "--steps", "2"]) == 0
    assert capsys.readouterr().out.endswith("2 steps as the oracle computed them\n")
    for arguments, problem in (
        (["--oracle", run, "run.seed=2"], "run.seed=2: the oracle takes the run's own config; leave it out"),
        (["--oracle", str(tmp_path)], "config.yaml"),
        (["--oracle", run, "--config", "x.yaml"], "not allowed with argument"),
    ):
        assert main(arguments) == 2
        assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("task", "mlm", "task = mlm: the oracle does not compute it"),
        ("optimizer.name", "lion", "optimizer.name = lion: the oracle knows torch's own, adamw and sgd"),
    ],
)
def test_what_it_does_not_compute_is_one_line(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: str, problem: str
) -> None:
    run = shutil.copytree(finished / "runs/it", tmp_path / "it", ignore=shutil.ignore_patterns("checkpoints"))
    text = (run / "config.yaml").read_text(encoding="utf-8")
    old = {"task": "task: pretrain\n", "optimizer.name": "  name: adamw\n"}[key]
    assert old in text
    (run / "config.yaml").write_text(text.replace(old, old.split(":")[0] + f": {value}\n"), encoding="utf-8")
    assert main(["--oracle", str(run)]) == 2
    assert problem in capsys.readouterr().err
