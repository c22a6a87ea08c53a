"""Import DeepSpeed without what it brings along and Mantissa never runs, so that a start is shorter."""

from __future__ import annotations

import importlib
import sys


def import_deepspeed() -> None:
    """Import DeepSpeed before anything else does; without MLflow, where that is installed.

    DeepSpeed imports all of it for its autotuner: 1.3 s of CPU time of each process (python -X importtime). Whoever
    wants MLflow afterwards can still import it.
    """
    if "mlflow" in sys.modules or "deepspeed" in sys.modules:
        return
    sys.modules["mlflow"] = None  # type: ignore[assignment]  # importing it fails, as where it is not installed
    try:
        importlib.import_module("deepspeed")
    finally:
        del sys.modules["mlflow"]


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon without `torch.compile`, before its ZeRO stages do, whatever the optimizer is.

    Compiling its kernels imports all of torch's compiler, in the first step of every run: 1.3 s of CPU time of each
    process of a small Llama's start (python -X importtime). Mantissa never calls it.
    """
    from deepspeed.runtime import compiler

    compile_, compiler.compile = compiler.compile, lambda: compiler.dummy_decorator
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.muon_optimizer")
    finally:
        compiler.compile = compile_
