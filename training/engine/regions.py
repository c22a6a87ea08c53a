"""The precision regions of an engine's model, checked against what is verified with them."""

from transformers import PreTrainedModel

from config.cli import REPOSITORY
from config.deepspeed.combinations import Combination, refuse_combination
from config.errors import UserError
from config.resolved import Resolved
from precision.manifest import load_manifest
from precision.regions import Regions


def regions_of(model: PreTrainedModel, resolved: Resolved, *, stage: int) -> Regions | None:
    """The precision regions of the manifest path. Raises UserError where their dtypes are not supported."""
    precision = resolved.config.precision
    if precision.path != "manifest" or precision.manifest is None:
        return None
    manifest, parallel = load_manifest(REPOSITORY / precision.manifest), resolved.config.parallel
    for key, ranks in (("tensor", parallel.tensor), ("expert", parallel.expert)):
        if ranks > 1 and any(rule.compute == "fp8" for rule in manifest.rules):
            what = f"FP8 is not verified with parallel.{key} = {ranks}"
            raise UserError(f"precision.manifest = {precision.manifest}: {what}; remove one of them")
    regions = Regions(model, manifest, precision.fp8)
    sixteen_bit = [compute for compute in ("bf16", "fp16") if regions.uses(compute)]
    kind = "mixed" if len(sixteen_bit) == 2 else (sixteen_bit or ["fp32"])[0]
    if regions.uses("fp8"):
        kind = {"fp32": "fp8", "bf16": "fp8_bf16"}.get(kind, kind)
    path = "cast" if kind == "fp32" else "manifest"
    refuse_combination(f"precision.manifest = {precision.manifest}", Combination(path, kind, stage, resolved.offload))
    return regions
