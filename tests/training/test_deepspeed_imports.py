"""What a start does not import, seen in one fresh interpreter."""

import importlib.util
import subprocess
import sys

import pytest

PROGRAM = """
import sys
import training.session
print("deepspeed" in sys.modules, "mlflow" in sys.modules)
import torch
from deepspeed.runtime import compiler
from training.engine.optimizer import import_muon_uncompiled
import_muon_uncompiled()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
print(compiler.compile() is torch.compile)
if "mlflow" in sys.argv:
    import mlflow.version
    print("mlflow" in sys.modules)
"""
WITH_MLFLOW = importlib.util.find_spec("mlflow") is not None


@pytest.fixture(scope="module")
def printed() -> list[str]:
    program = [sys.executable, "-c", PROGRAM, *["mlflow"] * WITH_MLFLOW]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120, check=True)
    return [line for line in done.stdout.splitlines() if set(line.split()) <= {"True", "False"}]


@pytest.mark.slow
def test_muon_is_imported_without_a_compiler(printed: list[str]) -> None:
    """DeepSpeed imports Muon in every first backward pass; compiling its kernels takes longer than the pass."""
    assert printed[1:3] == ["True False", "True"]


@pytest.mark.slow
@pytest.mark.skipif(not WITH_MLFLOW, reason="needs mlflow (requirements-dev.txt)")
def test_deepspeed_is_imported_without_mlflow_which_can_be_imported_later(printed: list[str]) -> None:
    assert [printed[0], printed[3]] == ["True False", "True"]
