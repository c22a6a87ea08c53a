"""Distillation through the engine equals plain torch on the same rows: loss, norm, metrics and weights."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chats import write_chats, write_teacher
from tests.training.tasks import distill_cases as cases
from tests.training.tasks import sft_cases
from training import references, teacher


@pytest.fixture(scope="module")
def folder(folder: Path) -> Path:
    """The usual folder, and a teacher of other weights with the same tokenizer."""
    write_teacher(folder / "teacher")
    return folder


def overrides_of(folder: Path, *, teacher: str = "teacher", **section: Any) -> tuple[str, ...]:
    keys = ", ".join(f"{name}: {value}" for name, value in section.items())
    return ("task=distill", "data.format=messages", f"distill={{teacher: {folder}/{teacher}, {keys}}}")


SETTINGS: dict[str, dict[str, Any]] = {
    "forward": {"loss": "forward_kl", "temperature": 2.0, "ce_weight": 0.25},
    "reverse": {"loss": "reverse_kl", "temperature": 1.0, "ce_weight": 0.0},
    "jsd, likeliest": {"loss": "jsd", "temperature": 1.5, "ce_weight": 0.5, "top_k": 5},
}
CELLS = [
    *(("forward", stage, packing, {}) for stage, packing in ((0, "best_fit"), (2, "none"), (3, "best_fit"))),
    ("reverse", 3, "none", {"sharded": "true"}),
    ("jsd, likeliest", 2, "best_fit", {}),
    *(("jsd, likeliest", stage, "none", {}) for stage in (0, 1, 3)),
    *(("reverse", stage, "best_fit", {"sharded": "true"}) for stage in (0, 1, 2)),
]


@pytest.mark.one_in(6)
@pytest.mark.parametrize("ranks", ["pair", "solo"])
@pytest.mark.parametrize(("name", "stage", "packing", "more"), CELLS)
def test_each_loss_equals_plain_torch(request, folder, name, stage, packing, more, ranks) -> None:
    group = request.getfixturevalue(ranks)
    overrides = (*overrides_of(folder, **SETTINGS[name], **more), f"data.packing={packing}")
    found = group.run(sft_cases.steps, folder=folder, stage=stage, overrides=overrides)[0]
    settings = {"top_k": 0} | SETTINGS[name]
    kind = settings.pop("loss")
    exact = cases.oracle(folder, found, kind=kind, **settings)
    require_equal(found, exact)
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        for metric in ("kl", "label_cross_entropy", "teacher_agreement"):
            assert mine["metrics"][metric] == pytest.approx(theirs[metric], rel=1e-5, abs=1e-7), metric


@pytest.mark.parametrize(("stage", "sharded"), [(2, "false"), (3, "true")])
def test_a_student_that_is_its_teacher_has_nothing_to_learn(pair, folder, stage, sharded) -> None:
    overrides = (*overrides_of(folder, teacher="base", sharded=sharded), "data.validation_fraction=0.1")
    for found in pair.run(sft_cases.sets, folder=folder, stage=stage, overrides=overrides):
        assert found["step"] == found["of step"]["kl"] == found["whole"] == 0
        assert found["of step"]["teacher_agreement"] == found["held out"].metrics["teacher_agreement"] == 1
        assert found["norm"] < 1e-6
        assert found["held out"].perplexity is None
        assert found["ledger"]["teacher, without masters"] == "float32"


def test_a_sharded_teacher_gathers_in_the_order_of_its_passes(solo, folder) -> None:
    """As the student does, for which training/engine/gradients.py tells DeepSpeed not to wait between streams."""
    overrides = overrides_of(folder, teacher="base", sharded="true")
    assert solo.run(cases.gathering_streams, folder=folder, stage=3, overrides=overrides) == [[False, False]]


@pytest.mark.parametrize("sources", [1, 2])
def test_cached_answers_are_the_live_ones(pair: ProcessGroup, folder: Path, sources: int) -> None:
    """All tokens but one are named, so the rest is that one. Each source of a mixture has its own."""
    vocabulary = AutoConfig.from_pretrained(folder / "base").vocab_size
    write_chats(folder / "more.jsonl", 30, seed=1)
    item = "{{path: {0}/{1}.jsonl, name: {2}, format: messages}}"
    both = f"[{item.format(folder, 'chats', 'a')}, {item.format(folder, 'more', 'b')}]"
    mixed = ("data.path=null", "data.format=auto", f"data.sources={both}") if sources == 2 else ()
    live, cached = (
        pair.run(sft_cases.sets, folder=folder, overrides=(*given, *mixed, "data.validation_fraction=0.2"))[0]
        for given in (overrides_of(folder), overrides_of(folder, top_k=vocabulary - 1))
    )
    for what in ("step", "norm", "whole", "of step", "of source", "sets"):
        assert cached[what] == pytest.approx(live[what], rel=1e-5), what
    assert len(live["of source"]) == len(live["sets"]) == (2 if sources == 2 else 0)


def test_a_teacher_of_other_tokens_is_refused_in_one_line(solo: ProcessGroup, folder: Path) -> None:
    def why(*overrides: str) -> str:
        found = str(solo.run(cases.refused, folder=folder, overrides=(*overrides_of(folder), *overrides))[0])
        assert found and "\n" not in found
        return found

    vocabulary = AutoConfig.from_pretrained(folder / "base").vocab_size
    write_teacher(folder / "wide", vocab_size=336)
    said = why(f"distill.teacher={folder}/wide")
    refused = f"has a vocabulary of 336 tokens, the student one of {vocabulary}; choose a teacher with as many"
    assert refused in said
    wide = ("distill.top_k=4", f"distill.teacher={folder}/wide", f"data.tokenizer={folder}/base")
    fits = (*overrides_of(folder), *wide, f"model.name_or_path={folder}/wide")
    assert not solo.run(cases.refused, folder=folder, overrides=fits)[0]
    assert refused in why(*wide), "its answers are cached"
    shutil.copytree(folder / "teacher", folder / "foreign")
    tokenizer = json.loads((folder / "foreign/tokenizer.json").read_text(encoding="utf-8"))
    ids = tokenizer["model"]["vocab"]
    ids["a"], ids["b"] = ids["b"], ids["a"]
    (folder / "foreign/tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    assert "its tokenizer is not that of the data: 'a' is" in why(f"distill.teacher={folder}/foreign")
    shutil.copytree(folder / "teacher", folder / "partial")
    tensors = load_file(weights := folder / "partial/model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, weights, metadata={"format": "pt"})
    for sharded in ("false", "true"):
        said = why(f"distill.teacher={folder}/partial", f"distill.sharded={sharded}")
        assert "partial: cannot be loaded (its files lack model.layers.1.mlp.up_proj.weight)" in said
    assert why("distill.teacher=nowhere/teacher").startswith("distill.teacher = nowhere/teacher: cannot be loaded (")
    assert f"the vocabulary has {vocabulary} tokens; set it to 0" in why(f"distill.top_k={vocabulary}")


def test_a_teacher_in_fp32_has_no_kernel_for_16_bits(solo: ProcessGroup, folder: Path) -> None:
    overrides = (*overrides_of(folder), "model.attention=flash_attention_2")
    assert solo.run(cases.attention_of_teacher, folder=folder, overrides=overrides) == ["sdpa"]


def test_numbers_of_a_model_are_kept_for_its_config(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Another rope is another teacher and another reference; a file that was saved again is the same."""
    base = Path(shutil.copytree(folder / "base", tmp_path / "base"))
    given = (*overrides_of(tmp_path, teacher="base", top_k=3), f"model.name_or_path={base}")
    resolved = sft_cases.resolve(folder, overrides=given)
    corpus: Any = SimpleNamespace(fingerprint="ab12", folder=tmp_path / "data")
    world: Any = SimpleNamespace(on_main=lambda act: act(), from_main=lambda value: value)
    monkeypatch.setattr(teacher, "_fill", lambda resolved, corpus, world, folder: folder.mkdir())
    monkeypatch.setattr(teacher, "require_intact", lambda folder, verify: None)

    def kept(**changed: Any) -> tuple[str, Path]:
        shape = json.loads((base / "config.json").read_text(encoding="utf-8"))
        (base / "config.json").write_text(json.dumps({**shape, **changed}), encoding="utf-8")
        numbers = references._identity(corpus, resolved, "sha256:ab12", (64,), "cpu")
        return numbers, teacher._cached(resolved, corpus, world, "sha256:ab12")

    first, again = kept(), kept(transformers_version="5.0.0")
    other = kept(rope_parameters={"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0})
    assert first == again and first[0] != other[0] and first[1] != other[1]


@pytest.mark.parametrize(("at_start", "problem"), [(True, "0.00 GiB do not fit"), (False, "No space left on device")])
def test_a_full_disk_is_one_line(solo: ProcessGroup, folder: Path, at_start: bool, problem: str) -> None:
    given = (*overrides_of(folder, top_k=5), "data.sequence_length=64", "data.too_long=truncate_left")
    [said] = solo.run(cases.refused_of_full_disk, folder=folder, at_start=at_start, overrides=given)
    assert re.match(rf"data.cache_dir: \S+-teacher-\S+ cannot be written \({problem}\); free space, or move it$", said)


def test_half_written_answers_are_not_taken_and_damaged_ones_named(solo: ProcessGroup, folder: Path) -> None:
    given = (*overrides_of(folder, top_k=3), "data.sequence_length=64", "data.too_long=truncate_left")
    solo.run(sft_cases.sets, folder=folder, overrides=given)
    caches = (folder / "cache").glob("*-teacher-*/train-ids.npy")
    [made] = [path.parent for path in caches if np.load(path, mmap_mode="r").shape[-1] == 3]
    partial = made.with_name(f"{made.name}.partial-1")
    made.rename(partial)
    (partial / "train-ids.npy").unlink()
    [again] = solo.run(sft_cases.sets, folder=folder, overrides=given)
    assert made.is_dir() and not partial.exists()
    [cached] = solo.run(sft_cases.sets, folder=folder, overrides=given)
    assert cached["step"] == again["step"]
    content = bytearray((made / "train-ids.npy").read_bytes())
    content[-1] ^= 1
    (made / "train-ids.npy").write_bytes(content)
    assert "train-ids.npy" in solo.run(cases.refused, folder=folder, overrides=given)[0]
