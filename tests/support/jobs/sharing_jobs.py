"""Jobs whose ranks share sequences, matrices or experts, beside the job of one rank."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import pytest
import torch
from safetensors.torch import load_file

from tests.support.jobs.launches import command, events, finish
from training.checkpoint.manifest import read_state

BEGINNING = ("run.steps=4", "evaluate.every_steps=0")
"""Overrides of a job that another one resumes."""
LENGTH = 31
"""[tokens] A sequence length that two ranks do not divide."""
MIXTURE = {"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTURE |= {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
GIVEN = {
    "sequence": (f"data.sequence_length={LENGTH}", "data.document_masking=true", "batch.micro_size=4"),
    "tensor": ("batch.micro_size=4", "telemetry.every_steps=2", "optimizer.eps=1e-4"),
    "expert": (
        f"model={{architecture: mixtral, balance_loss: 0.01, config: {json.dumps(MIXTURE)}}}",
        *("telemetry.every_steps=2", "optimizer.eps=1e-4"),
    ),
}
"""Overrides of all jobs whose ranks share this."""


class Jobs:
    """Small jobs in a folder whose ranks may share what `kind` says."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.folder, self.kind, self.shared = folder, kind, f"parallel.{kind}=2"

    def run(self, name: str, *overrides: str, ranks: int) -> str:
        """Run a job to its end; what it printed."""
        given = ("schedule.name=constant", *GIVEN[self.kind], *overrides)
        return finish(command("python", self.folder, name, *given), ranks=ranks)

    def run_one_and_two(self, *overrides: str) -> Self:
        """Run `one` on one rank, `two` on two ranks that share, and `first`, its beginning."""
        self.run("one", *overrides, ranks=1)
        self.run("two", *overrides, self.shared, ranks=2)
        self.run("first", *overrides, self.shared, *BEGINNING, ranks=2)
        return self

    def resume(self, name: str, *overrides: str, ranks: int, of: str = "first") -> str:
        """Resume a copy of the run `of` under another name; what was printed."""
        shutil.copytree(self.folder / "runs" / of, self.folder / "runs" / name)
        output = self.run(name, *overrides, ranks=ranks)
        assert ("checksums agree" in output) == (name != "same") or self.kind == "sequence", output
        return output

    def events(self, name: str, kind: str) -> list[dict]:
        """The events of one kind in a run."""
        return events(self.folder, name, kind)

    def numbers(self, name: str, keys: Sequence[str] = ("loss", "grad_norm")) -> list[list[float]]:
        """These fields of each step, and the validation losses at the end."""
        steps = [[event[key] for key in keys] for event in self.events(name, "step")]
        return [*steps, [event["loss"] for event in self.events(name, "eval")]]

    def assert_close(self, name: str, other: str = "one") -> None:
        """Two runs have the same numbers to rounding."""
        for mine, theirs in zip(self.numbers(name), self.numbers(other), strict=True):
            assert mine == pytest.approx(theirs, rel=1e-5)

    def export(self, name: str, out: Path) -> dict[str, torch.Tensor]:
        """The FP32 tensors that `tools.export_hf` writes of a run's last checkpoint."""
        checkpoint = self.folder / "runs" / name / "checkpoints" / "step-6"
        said = finish(["python", "-m", "tools.export_hf", str(checkpoint), str(out), "--dtype", "fp32"])
        assert (out / "model.safetensors").is_file(), said
        return load_file(out / "model.safetensors")

    def assert_equal_exports(self, one: str, two: str, out: Path) -> None:
        """The exports of two runs have the same tensors, whole, to rounding."""
        mine, theirs = (self.export(name, out / name) for name in (one, two))
        assert mine.keys() == theirs.keys()
        for name, values in mine.items():
            assert theirs[name].shape == values.shape
            assert float((theirs[name] - values).abs().max()) < 1e-5, name

    def assert_equal_telemetry(self) -> None:
        """The modules' gradients of `two` are those of `one`."""
        for one, two in zip(self.events("one", "telemetry"), self.events("two", "telemetry"), strict=True):
            assert two["gradients"].keys() == one["gradients"].keys()
            for module, figures in one["gradients"].items():
                for key in ("norm", "rms", "maximum"):
                    assert two["gradients"][module][key] == pytest.approx(figures[key], rel=1e-3), (module, key)

    def checksums_of_no_update(self, name: str, *overrides: str, ranks: int) -> tuple[object, object]:
        """Parameters and master checksums in the checkpoint of a step that changes nothing."""
        given = ["run.steps=1", "schedule.warmup_steps=0", "optimizer.learning_rate=0"]
        self.run(name, *given, "evaluate.every_steps=0", "checkpoint.every_steps=1", *overrides, ranks=ranks)
        state = read_state(self.folder / "runs" / name / "checkpoints" / "step-1")
        return state["parameters"], state["checksums"]["master"]
