"""What a start does not import."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

MUON = """
import sys, torch
from deepspeed.runtime import compiler
from training.engine.optimizer import import_muon_uncompiled
import_muon_uncompiled()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
print(compiler.compile() is torch.compile)
"""

MLFLOW = """
import sys
import training.session
print("deepspeed" in sys.modules, "mlflow" in sys.modules)
import mlflow.version
print("mlflow" in sys.modules)
"""


def printed(program: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.split()


def test_muon_is_imported_without_a_compiler() -> None:
    """DeepSpeed imports Muon in every first backward pass; compiling its kernels takes longer than the pass."""
    assert printed(MUON)[-3:] == ["True", "False", "True"]


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow (requirements-dev.txt)")
def test_deepspeed_is_imported_without_mlflow_which_can_be_imported_later() -> None:
    assert printed(MLFLOW)[-3:] == ["True", "False", "True"]
