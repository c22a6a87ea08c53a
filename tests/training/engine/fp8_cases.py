"""Code run inside the processes of test_fp8.py. Every function is called on every rank."""

from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from config.schema import Fp8Section
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.support.models.small_models import small_model
from tests.support.models.small_run import engine_of, manifest_of, resolve
from training.distributed import World
from training.engine import kernels


def chosen_kernels(world: World, *, folder: str, manifest: dict[str, Any]) -> dict[str, str]:
    """The remarks on torch's scaled matmul for FP8 layers: sound, not available, and wrong on the last rank."""
    overrides = [*manifest_of(folder, manifest), "precision.fp8.kernel=scaled_mm"]

    def built(*more: str) -> str:
        try:
            with engine_of(world, resolve(world, stage=2, compute="fp32", overrides=[*overrides, *more])) as engine:
                return next(note for note in engine.notes if "fp8.kernel" in note)
        except UserError as error:
            return str(error)

    found = {"asked": built(), "by block": built("precision.fp8.scaling=block32")}
    own, no_kernel = torch._scaled_mm, kernels.no_kernel
    torch._scaled_mm = lambda *given, **more: own(*given, **more) * (1.03 if world.rank else 1.0)
    kernels.no_kernel = lambda *given: ""  # as on a GPU that has it, where `auto` takes it
    try:
        found["asked, wrong"] = built()
        regions = Regions(small_model("llama"), load_manifest(Path(overrides[1].partition("=")[2])), Fp8Section())
        found["auto, wrong"] = kernels.choose_fp8_kernel(regions, world)[0]
        found["then"] = regions.fp8.kernel
    finally:
        torch._scaled_mm, kernels.no_kernel = own, no_kernel
    return found
