"""Keys that do not fit together are refused, and those that do are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from config.errors import UserError
from config.load import load_config


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "demo.yaml").write_text("model: {architecture: llama}\nrun: {steps: 100}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


REFUSED = [
    (["model.architecture=null"], "model.architecture is missing"),
    (["model.name_or_path=gpt2"], "model.name_or_path = 'gpt2' excludes model.architecture = 'llama'"),
    (["model.architecture=null", "model.name_or_path=./nowhere"], "model.name_or_path = './nowhere' is not a folder"),
    (["model.config.torch_dtype=bfloat16"], "model.config.torch_dtype is decided by precision.compute"),
    (["model.config._attn_implementation=eager"], "model.config._attn_implementation is decided by model.attention"),
    (["run.name=a/b"], "run.name = 'a/b' is not the name of a folder"),
    (["run.name=''"], "run.name = '' is not the name of a folder"),
    (["run.resume=nowhere"], "run.resume = 'nowhere' does not exist"),
    (["data.source=jsonl"], "data.path is missing; data.source = jsonl needs it"),
    (["data.source=hub"], "data.path is missing; data.source = hub needs it"),
    (["data.source=text", "data.path=nowhere/*.txt"], "data.path = 'nowhere/*.txt' matches no file"),
    (["data.path=a.txt"], "data.path = 'a.txt' is not read by data.source = stdlib"),
    (["data.name=en"], "data.name = 'en' is only read by data.source = hub"),
    (["data.tokenizer=bpe:many"], "data.tokenizer = 'bpe:many' names no vocabulary size"),
    (["schedule.warmup_steps=101"], "schedule.warmup_steps = 101 is more than run.steps = 100"),
    (["schedule={name: wsd, warmup_steps: 90}"], "schedule.decay_fraction = 0.2 of run.steps = 100 leaves no room"),
    (["precision.path=manifest"], "precision.path = manifest is not built yet; use cast"),
    (["precision.manifest=m.json"], "precision.manifest is only read by precision.path = manifest"),
    (["precision.loss_scale.initial=1000"], "precision.loss_scale.initial = 1000 is not a power of two"),
    (["precision.loss_scale.minimum=0.5"], "precision.loss_scale.minimum = 0.5 is not a whole number"),
    (["precision.loss_scale={initial: 2, minimum: 4}"], "precision.loss_scale.initial = 2 is below"),
    (["evaluate.every_steps=5", "data.validation_fraction=0"], "evaluate.every_steps = 5 needs held-out text"),
    (["faults=[{kind: inf_gradient, step: 101}]"], "faults[0].step = 101 is after the last step"),
]


@pytest.mark.parametrize(("overrides", "expected"), REFUSED)
def test_refused(folder: Path, overrides: list[str], expected: str) -> None:
    with pytest.raises(UserError) as caught:
        load_config(folder / "demo.yaml", overrides, None)
    where, _, text = str(caught.value).partition(": ")
    assert text.startswith(expected)
    assert where in ("command line", str(folder / "demo.yaml"))
    assert "\n" not in text


ALLOWED = [
    ["schedule.warmup_steps=100"],
    ["schedule={name: wsd, warmup_steps: 80}"],
    ["data.source=text", "data.path=a.txt"],
    ["data.source=text", "data.path='*.txt'"],
    ["data.source=hub", "data.path=owner/name", "data.name=en"],
    ["precision.loss_scale={policy: static, initial: 1000, minimum: 0.5}"],
    ["precision.loss_scale.initial=1"],
    ["model.architecture=null", "model.name_or_path=owner/name"],
    ["run.resume=never"],
    ["faults=[{kind: inf_gradient, step: 100}]"],
    ["data.validation_fraction=0"],
]


@pytest.mark.parametrize("overrides", ALLOWED)
def test_allowed(folder: Path, overrides: list[str]) -> None:
    load_config(folder / "demo.yaml", overrides, None)


def test_a_glob_from_the_root_is_found(folder: Path) -> None:
    load_config(folder / "demo.yaml", ["data.source=text", f"data.path={folder}/**/*.txt"], None)
