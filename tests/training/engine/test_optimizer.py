"""What a start brings along for optimizers that Mantissa does not have."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, torch
from deepspeed.runtime import compiler
from training.engine.optimizer import import_muon_uncompiled
import_muon_uncompiled()
print("deepspeed.runtime.zero.muon.original_muon" in sys.modules, "torch._inductor.compile_fx" in sys.modules)
print(compiler.compile() is torch.compile)
"""


def test_muon_is_imported_without_a_compiler() -> None:
    """DeepSpeed imports Muon in every first backward pass; compiling its kernels takes longer than the pass."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split()[-3:] == ["True", "False", "True"]
