"""Builds hooks.cpp and loads it, which has to come before torch is imported: so nothing here imports it."""

import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path


def load_hooks() -> None:
    """Load the library, built once for each torch and each version of the file into the user's cache."""
    source, spec = Path(__file__).with_name("hooks.cpp"), find_spec("torch")
    assert spec is not None and spec.origin is not None and "torch" not in sys.modules
    torch = Path(spec.origin).parent
    name = hashlib.sha256(source.read_bytes() + f"{version('torch')} {torch}".encode()).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mantissa-tests"
    library = cache / f"fake_cuda-{name}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / library.name
            paths = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include", f"-L{torch}/lib"]
            options = ["-shared", "-fPIC", "-std=c++20", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch}/lib"]
            subprocess.run(["g++", str(source), "-o", str(built), *paths, *options], check=True)
            built.rename(library)
    ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
