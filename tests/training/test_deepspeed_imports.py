"""A start imports DeepSpeed's Muon without a compiler, seen in one fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys
from deepspeed.runtime import compiler
from training.engine.optimizer import import_muon_uncompiled
import_muon_uncompiled()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
import torch
print(compiler.compile() is torch.compile)
"""


@pytest.mark.slow
def test_muon_is_imported_without_a_compiler() -> None:
    """DeepSpeed imports Muon in every first backward pass; compiling its kernels takes longer than the pass."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    printed = [line for line in done.stdout.splitlines() if set(line.split()) <= {"True", "False"}]
    assert printed == ["True False", "True"]
