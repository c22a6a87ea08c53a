"""Ops of DeepSpeed's that are built from source with the first run that needs them. Only offload from a GPU does."""

import os
import sys
from pathlib import Path

from deepspeed.accelerator import get_accelerator

from config.errors import UserError, one_line
from training.start import op_builds


def load_op(builder: str, needed_by: str) -> None:
    """Build or load an op, by its class's name, before DeepSpeed does. needed_by: the setting. Raises UserError."""
    _prefer_own_ninja()
    op_builds.use_own_folder()
    op = get_accelerator().create_op_builder(builder)
    try:
        with op_builds.exclusive_build(op.name, lambda line: print(line, flush=True)):
            op.load(verbose=False)
    except Exception as error:  # of the compiler, of torch, of the loader
        raise UserError(
            f"{needed_by}: DeepSpeed's op {op.name} cannot be built in {op_builds.extensions_folder()} "
            f"({one_line(error)}); install a C++ compiler (apt-get install g++) and ninja (pip install ninja), set "
            "TORCH_EXTENSIONS_DIR to a folder that may be written, or train without offload"
        ) from error


def _prefer_own_ninja() -> None:
    """Put this environment's programs first in PATH: another ninja would consider every op outdated and rebuild it."""
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *path])
