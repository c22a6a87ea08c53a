"""Adapters through the engine equal plain torch with plain peft; the base stays as it is and has no state."""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs.launches import events
from tests.support.jobs.process_group import ProcessGroup
from tests.support.jobs.task_jobs import overrides_of
from tests.support.models.plain_steps import require_equal
from tests.support.models.small_run import manifest_of
from tests.support.rows.chats import write_folder
from tests.training.checkpoint.resume_cases import checkpoint_of, name_of
from tests.training.tasks import sft_cases as cases
from training.checkpoint.reader import PLAIN

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lora": ([cases.LORA], cases.GIVEN),
    "dora, rslora, modules": (
        ["adapter={kind: dora, r: 4, alpha: 8, rslora: true, target_modules: [q_proj, v_proj]}"],
        {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"], "use_dora": True, "use_rslora": True},
    ),
    "lora and the output embedding": (
        ["adapter={kind: lora, r: 2, alpha: 8, init: gaussian, modules_to_save: [lm_head]}"],
        {"r": 2, "lora_alpha": 8, "target_modules": "all-linear", "modules_to_save": ["lm_head"]},
    ),
}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("kind", KINDS)
def test_one_and_two_ranks_equal_plain_peft(pair: ProcessGroup, solo: ProcessGroup, folder: Path, kind: str) -> None:
    overrides, given = KINDS[kind]
    exact: dict[str, Any] | None = None
    for group, stages in ((pair, (0, 1, 2, 3)), (solo, (2,))):
        for stage in stages:
            found, *_ = group.run(cases.steps, folder=folder, stage=stage, overrides=tuple(overrides))
            exact = exact or cases.oracle(folder, found, adapter=given)
            require_equal(found, exact)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), (2, "bf16"), (3, "bf16"), (2, "fp16")])
def test_the_base_is_held_once_in_the_compute_dtype(pair: ProcessGroup, folder: Path, stage: int, compute: str) -> None:
    given = {"folder": folder, "stage": stage, "compute": compute, "overrides": (cases.LORA,)}
    both = pair.run(cases.ledger, **given)
    width = 4 if compute == "fp32" else 2
    for rows in both:
        entry = {row.what: row for row in rows}
        frozen, whole = entry["of these frozen"], entry["parameters"]
        assert frozen.dtype == whole.dtype == {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[compute]
        trained = (whole.bytes - frozen.bytes) // width
        share = 1 if stage == 0 else 2
        held = trained * (2 if stage == 3 else 1)  # of which ZeRO-3 holds a half here
        assert entry["masters"].bytes // 4 == pytest.approx(held / share, abs=64)
        assert entry["moments"].bytes // 8 == pytest.approx(held / share, abs=64)
    assert "is frozen, but has a gradient" in pair.run(cases.with_a_frozen_gradient, **given)[0]


def test_rules_of_a_manifest_reach_the_adapter(pair: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    rule = {"match": "*.q_proj", "compute": "fp32", "reason": "a test"}
    given = (cases.LORA, *manifest_of(tmp_path, {"default": "bf16", "rules": [rule]}))
    regions = pair.run(cases.regions, folder=folder, overrides=given)[0]["dtypes"]
    own = {name: dtype for name, dtype in regions.items() if "q_proj" in name}
    assert {name.rpartition("q_proj.")[2] for name in own} == {"base_layer", "lora_A.default", "lora_B.default"}
    assert set(own.values()) == {"fp32"}
    assert regions["model.layers.0.self_attn.k_proj.lora_A.default"] == "bf16"


_UNDER_A_MANIFEST = ["precision={compute: auto, manifest: config/manifests/bf16.json}"]
SOUND = {
    # the files of a masked language model have no pooler, of which the adapter trains a copy
    "classify": ("classify, LoRA", []),
    "classify, manifest": ("classify, LoRA", _UNDER_A_MANIFEST),
    "head, manifest": ("sft, LoRA", ["adapter={kind: lora, r: 4, modules_to_save: [lm_head]}", *_UNDER_A_MANIFEST]),
    "dora, manifest": ("sft, LoRA", ["adapter={kind: dora, r: 4}", *_UNDER_A_MANIFEST]),
}


@pytest.mark.parametrize("what", SOUND)
def test_nothing_is_said_of_a_sound_run(solo: ProcessGroup, every_task: Path, what: str) -> None:
    name, further = SOUND[what]
    run, given = f"sound-{name_of(what)}", [*overrides_of(every_task, name), *further, "guard.self_check_every=1"]
    checkpoint_of(solo, every_task, run, given)
    assert len(events(every_task, run, "precision")) == 1 and len(events(every_task, run, "self_check")) == 2
    assert not events(every_task, run, "warning")


ADAPTERS = {
    "tied": (True, "{kind: lora, r: 4}"),
    "untied": (False, "{kind: lora, r: 4}"),
    "tied, a head of its own": (True, "{kind: lora, r: 4, modules_to_save: [lm_head]}"),
    "tied, dora": (True, "{kind: dora, r: 4}"),
    "tied, nf4": (True, "{kind: lora, r: 4, base: nf4}"),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "kind"), list(product((0, 1, 2, 3), ADAPTERS)))
def test_a_checkpoint_has_no_tensor_of_the_base(pair: ProcessGroup, tmp_path: Path, kind: str, stage: int) -> None:
    """Weights, masters and both moments of what is trained, and no more than alignment and counters besides."""
    tied, adapter = ADAPTERS[kind]
    if "nf4" in kind:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    write_folder(tmp_path, **sizes, vocab_size=2000, tie_word_embeddings=tied)
    options = {"stage": stage, "compute": "bf16" if stage else "fp32", "overrides": (f"adapter={adapter}",)}
    trained = pair.run(cases.saved, folder=tmp_path, to=tmp_path / "saved", **options)[0]
    held = 0
    for path in sorted((tmp_path / "saved/deepspeed").glob("*.pt")):
        content = PLAIN.read(path)
        module = content.get("module") or {}
        assert set(module) - set(content.get("buffer_names") or ()) <= trained.keys(), path.name
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors_in(content)
        }
        held += sum(storages.values())
    values = sum(trained.values())
    assert 12 * values <= held <= 16 * values + 2**14


def tensors_in(content: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested containers and objects."""
    if isinstance(content, torch.Tensor):
        yield content
    elif isinstance(content, dict):
        for value in content.values():
            yield from tensors_in(value)
    elif isinstance(content, list | tuple):
        for value in content:
            yield from tensors_in(value)
