"""Jobs whose ranks share sequences, matrices or experts, beside the job of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import pytest
import torch
from safetensors.torch import load_file

from tests.support.launches import events, finish
from training.checkpoint.manifest import read_state

BEGINNING = ("run.steps=4", "evaluate.every_steps=0")
"""Of a job that another one resumes."""


class RunJob(Protocol):
    """Run a small job to its end; what it printed."""

    def __call__(self, folder: Path, name: str, *overrides: str, ranks: int) -> str: ...


def run_one_and_two(folder: Path, job: RunJob, shared: str) -> Path:
    """The folder, with the run `one` of one rank, `two` of two ranks that share, and `first`, its beginning."""
    job(folder, "one", ranks=1)
    job(folder, "two", shared, ranks=2)
    job(folder, "first", shared, *BEGINNING, ranks=2)
    return folder


def numbers(folder: Path, name: str, keys: Sequence[str] = ("loss", "grad_norm")) -> list[list[float]]:
    """Of each step, and the validation losses at the end."""
    steps = [[event[key] for key in keys] for event in events(folder, name, "step")]
    return [*steps, [event["loss"] for event in events(folder, name, "eval")]]


def assert_close(found: list[list[float]], expected: list[list[float]]) -> None:
    """Of two runs' `numbers`."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def assert_two_train_as_one(folder: Path) -> None:
    """The record of `two` is that of `one`."""
    assert_close(numbers(folder, "two"), numbers(folder, "one"))
    exact = ("tokens", "sample_ids_sha256", "position", "lr", "applied")
    assert numbers(folder, "two", exact)[:-1] == numbers(folder, "one", exact)[:-1]


def assert_equal_telemetry(folder: Path) -> None:
    """The modules' gradients of `two` are those of `one`."""
    for one, two in zip(events(folder, "one", "telemetry"), events(folder, "two", "telemetry"), strict=True):
        assert two["gradients"].keys() == one["gradients"].keys()
        for module, figures in one["gradients"].items():
            for figure in ("norm", "rms", "maximum"):
                assert two["gradients"][module][figure] == pytest.approx(figures[figure], rel=1e-3), (module, figure)


def assert_equal_checkpoints_of_no_update(folder: Path, job: RunJob, shared: str) -> None:
    """Checksums do not depend on who holds what."""
    found = []
    for name, overrides, ranks in (("one", [], 1), ("two", [shared], 2)):
        given = ["run.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=0"]
        given += ["evaluate.every_steps=0", "checkpoint.every_steps=1"]
        job(folder, name, *given, *overrides, ranks=ranks)
        state = read_state(folder / "runs" / name / "checkpoints" / "step-1")
        found.append((state["parameters"], state["checksums"]["master"]))
    assert found[0] == found[1]


def exported(folder: Path, name: str, out: Path) -> dict[str, torch.Tensor]:
    """The FP32 tensors that `tools.export_hf` writes of a run's last checkpoint."""
    checkpoint = folder / "runs" / name / "checkpoints" / "step-6"
    said = finish(["python", "-m", "tools.export_hf", str(checkpoint), str(out), "--dtype", "fp32"])
    assert (out / "model.safetensors").is_file(), said
    return load_file(out / "model.safetensors")


def assert_equal_exports(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    """Whole tensors, to rounding."""
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert two[name].shape == values.shape
        assert float((two[name] - values).abs().max()) < 1e-5, name
