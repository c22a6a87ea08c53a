"""Adapters through the engine equal plain torch with plain peft; the base stays as it is and has no state."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.plain_steps import require_equal
from tests.support.rows.chats import write_base, write_chats
from tests.training.tasks import sft_cases as cases
from training.checkpoint.reader import PLAIN

KINDS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "lora": (["adapter={kind: lora, r: 4, alpha: 8}"], {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
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
            if exact is None:
                model = cases.base_of(folder, given, found["before"])
                exact = cases.oracle(folder, [step["rows"] for step in found["steps"]], model)
            require_equal(found, exact)


LORA = "adapter={kind: lora, r: 4, alpha: 8}"


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), (2, "bf16"), (3, "bf16"), (2, "fp16")])
def test_the_base_is_held_once_in_the_compute_dtype(pair: ProcessGroup, folder: Path, stage: int, compute: str) -> None:
    both = pair.run(cases.ledger, folder=folder, stage=stage, compute=compute, overrides=(LORA,))
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
    assert (
        "is frozen, but has a gradient"
        in pair.run(cases.with_a_frozen_gradient, folder=folder, stage=stage, compute=compute, overrides=(LORA,))[0]
    )


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_single_steps_are_compared_with_fp32(pair: ProcessGroup, folder: Path, stage: int) -> None:
    dropping = LORA[:-1] + ", dropout: 0.5}"  # which single steps are compared without
    noisy = (dropping, "sft={neftune_alpha: 5, loss: row}")  # the reference has the same noise
    [exact], _ = pair.run(cases.parity_steps, folder=folder, stage=stage, overrides=noisy)
    assert exact["loss"] == pytest.approx(exact["reference_loss"], rel=1e-6)
    assert exact["grad_norm"] == pytest.approx(exact["reference_grad_norm"], rel=1e-5)
    assert max(exact["update_error"].values()) < 1e-4
    [half], _ = pair.run(cases.parity_steps, folder=folder, stage=stage, compute="bf16", overrides=(LORA,))
    assert half["loss"] == pytest.approx(half["reference_loss"], rel=0.01)
    assert max(half["drift"].values()) == 0
    assert all(".lora_" in name for name in half["parameters"])


def test_telemetry_and_its_probe_are_of_the_adapter(pair: ProcessGroup, folder: Path) -> None:
    found = pair.run(cases.telemetry, folder=folder, compute="bf16", overrides=(LORA,))[0]
    assert found["drift"]["maximum"] == 0
    assert found["probe"]
    assert all(".lora_" in name for name in found["probe"])
    assert all(agreement["cosine"] > 0.99 for name, agreement in found["probe"].items() if ".lora_B." in name)


def test_a_step_that_is_not_finite_is_attributed_to_the_adapters_module(pair: ProcessGroup, folder: Path) -> None:
    module = "model.layers.1.self_attn.q_proj.lora_B.default"
    fault = f"faults=[{{kind: nan_gradient, step: 1, rank: 1, module: {module}}}]"
    (rank, finding), *_ = pair.run(cases.causes, folder=folder, compute="bf16", overrides=(LORA, fault))[0]
    assert (rank, finding.module) == (1, f"{module}.weight")


def test_rules_of_a_manifest_reach_the_adapter(pair: ProcessGroup, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "manifest.json"
    rule = {"match": "*.q_proj", "compute": "fp32", "reason": "a test"}
    path.write_text(json.dumps({"default": "bf16", "rules": [rule]}))
    regions = pair.run(cases.regions, folder=folder, overrides=(LORA, f"precision.manifest={path}"))[0]["dtypes"]
    own = {name: dtype for name, dtype in regions.items() if "q_proj" in name}
    assert {name.rpartition("q_proj.")[2] for name in own} == {"base_layer", "lora_A.default", "lora_B.default"}
    assert set(own.values()) == {"fp32"}
    assert regions["model.layers.0.self_attn.k_proj.lora_A.default"] == "bf16"


ADAPTERS = {
    "tied": (True, "{kind: lora, r: 4}"),
    "untied": (False, "{kind: lora, r: 4}"),
    "tied, a head of its own": (True, "{kind: lora, r: 4, modules_to_save: [lm_head]}"),
    "tied, dora": (True, "{kind: dora, r: 4}"),
    "tied, nf4": (True, "{kind: lora, r: 4, base: nf4}"),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "kind"), list(product((0, 1, 2, 3), ADAPTERS)))
def test_a_checkpoint_has_no_tensor_of_the_base(pair: ProcessGroup, tmp_path: Path, kind: str, stage: int) -> None:
    """Weights, masters and both moments of what is trained, and no more than alignment and counters besides."""
    tied, adapter = ADAPTERS[kind]
    if "nf4" in kind:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    write_base(tmp_path / "base", **sizes, vocab_size=2000, tie_word_embeddings=tied)
    write_chats(tmp_path / "chats.jsonl", 60)
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
