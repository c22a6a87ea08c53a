"""The config at other ZeRO stages: the words of a command line that ask for one, and the layout that training has then.

A stage that the config refuses is left out.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from config.cli import REPOSITORY
from config.command_line import parse
from config.deepspeed.choice import FOLDER, json_name
from config.deepspeed.combinations import STAGES, Combination, refuse_combination
from config.errors import UserError
from config.resolved import Resolved, resolve_run
from launch.hosts import without_options
from launch.plan.layout import Layout, layout_of
from precision.manifest import load_manifest


def words_at(stage: int, words: Sequence[str], resolved: Resolved) -> list[str]:
    """`words` with another ZeRO stage. A JSON that they name, or one of the user's own, gives way to the one of
    ds_configs/ with the same dtype and offload. Raises UserError if there is none."""
    kept = [word for word in words if word.partition("=")[0] != "deepspeed.stage"]
    unnamed = without_options(kept, "--deepspeed-config", flags=["deepspeed.config", "deepspeed.offload"])
    if unnamed == kept and resolved.deepspeed_path.parent.resolve() == REPOSITORY / FOLDER:
        return [*kept, f"deepspeed.stage={stage}"]
    offload = "none" if resolved.offload == "none" else "cpu"
    return [*unnamed, f"deepspeed.config={json_name(stage, resolved.compute, offload)}"]


def layouts_at(
    layout: Layout, words: Sequence[str], resolved: Resolved, environment: Mapping[str, str]
) -> dict[int, Layout]:
    """ZeRO stage to `layout` at that stage, with the ZeRO section of the JSON that it has there."""
    found = {}
    for stage in STAGES:
        if stage == layout.stage:
            found[stage] = layout
            continue
        with suppress(UserError):
            other = resolve_run(parse(words_at(stage, words, resolved)), environment)
            check_manifest(other)
            at = layout_of(other, world=layout.world, on_cpu=layout.on_cpu)
            found[stage] = replace(layout, stage=stage, zero=at.zero, overlap=at.overlap, offload=at.offload)
    return found


def check_manifest(resolved: Resolved) -> None:
    """Raises UserError for a manifest with dtypes that its ZeRO stage does not train."""
    name = resolved.config.precision.manifest
    if resolved.config.precision.path == "manifest" and name is not None:
        manifest = load_manifest(REPOSITORY / name)
        scaled = "fp16" in (manifest.default, *(rule.compute for rule in manifest.rules))
        kind = Combination("manifest", "fp16" if scaled else "bf16", resolved.zero_stage, resolved.offload)
        refuse_combination(f"precision.manifest = {name}", kind)
