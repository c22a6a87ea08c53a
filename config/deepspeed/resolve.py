"""Merges the run config into a DeepSpeed JSON and resolves every "auto".

The run config owns batch, clipping, precision and loss scale; the JSON owns how ZeRO shards and offloads. A value set
in both must be the same. Combinations and settings that config/deepspeed/combinations.py refuses are refused here.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any, Literal

from config.batch import BatchPlan, plan_batch
from config.deepspeed.combinations import SETTINGS, Combination, refuse_combination, refuse_settings
from config.deepspeed.document import check_document, leaves, offload, zero_stage
from config.errors import UserError
from config.load import show
from config.rules import needs_bf16
from config.schema import Config

Dtype = Literal["fp32", "bf16", "fp16"]

# DeepSpeed's own progress lines would repeat Mantissa's; the default interval differs between its versions.
_NEVER_PRINT = 10**9

# Keys of the fp16 section that DeepSpeed does not read under a static loss scale.
_DYNAMIC_ONLY = frozenset(
    {"initial_scale_power", "loss_scale_window", "hysteresis", "min_loss_scale", "consecutive_hysteresis"}
)


def resolve_json(config: Config, path: Path, document: dict[str, Any], *, world_size: int) -> dict[str, Any]:
    """The DeepSpeed JSON of this run: `document` with every "auto" replaced and every owned value filled in.

    config: its precision.compute may still be auto. path: where `document` was read. Raises UserError for a key or
    value that is wrong, refused or not verified, a conflict with the run config, or an "auto" that nothing resolves.
    """
    check_document(path, document)
    check_choices(config, path, document)
    compute, stage = compute_dtype(config, path, document), zero_stage(document)
    if config.precision.path == "cast":  # the dtypes of a manifest are known once the model is built
        refuse_combination(str(path), Combination("cast", compute, stage, offload(document)))
    refuse_settings(str(path), dict(leaves(document)), stage)
    if config.model.compile and stage == 3:
        problem = "gathers parameters in hooks inside the blocks, which torch.compile does not trace"
        raise UserError(f"{path}: ZeRO-3 {problem}; use ZeRO-2, or set model.compile=false")
    if config.precision.masters == "split":  # config/rules.py checks them against the run config alone
        kept, key = offload(document), "precision.masters = split in the run config"
        if compute != "bf16":
            problem = f"computes in {compute}, but {key} {needs_bf16(compute)}"
            raise UserError(f"{path}: {problem}; set precision.compute to bf16, or remove precision.masters")
        if kept != "none":
            problem = f"keeps {kept} in host memory, but {key} holds masters and weights together on the device"
            raise UserError(f"{path}: {problem}; set deepspeed.offload to none, or remove precision.masters")
    if config.guard.update_checks and "optimizer" in offload(document):
        problem = f"guard.update_checks = {config.guard.update_checks} in the run config cannot judge its updates"
        why = "DeepSpeed's kernel for host memory keeps optimizer.betas in FP32"
        raise UserError(f"{path}: offloads the optimizer, but {problem}: {why}; set guard.update_checks=0")
    size = document.get("zero_optimization", {}).get("zero_hpz_partition_size", 1)
    if size < 1 or world_size % min(size, world_size):  # DeepSpeed would stop with an AssertionError in every process
        problem = f"zero_optimization.zero_hpz_partition_size = {size} does not divide {world_size} processes"
        raise UserError(f"{path}: {problem}; set it to the processes of one node")
    _check_slices(config, path, document)
    return resolve_unverified(config, path, document, world_size=world_size)


def _check_slices(config: Config, path: Path, document: dict[str, Any]) -> None:
    """Refuse settings that affect the numbers if ranks have slices, and offload if these are slices of matrices."""
    values, parallel = dict(leaves(document)), config.parallel
    given = f"parallel.tensor = {parallel.tensor}" if parallel.tensor > 1 else f"parallel.expert = {parallel.expert}"
    if parallel.tensor == parallel.expert == 1:
        return
    if offload(document) != "none" and parallel.tensor > 1:
        raise UserError(f"{path}: offloads {offload(document)}, which is not verified with {given}; remove one of them")
    for row in SETTINGS:
        offloads = row.key.startswith("zero_optimization.offload_")  # the target is refused above or for any run
        if row.in_json and not offloads and values.get(row.key, row.base) not in (row.base, "auto"):
            setting = f"{row.key} = {show(values[row.key])}"
            raise UserError(f"{path}: {setting} is not verified with {given}; remove one of them")

    if parallel.expert > 1 and not zero_stage(document):
        raise UserError(
            f"{path}: ZeRO stage 0 with {given}: without ZeRO, DeepSpeed 0.19.8 clips by the mean of the ranks' "
            "gradient norms, which differ where their experts do (measured: an update of 0.062760, not 0.062279); set "
            "deepspeed.stage=1, 2 or 3, or parallel.expert=1"
        )


def resolve_unverified(config: Config, path: Path, document: dict[str, Any], *, world_size: int) -> dict[str, Any]:
    """`resolve_json` without refusing combinations, which the precision matrix measures too."""
    resolved = copy.deepcopy(document)
    compute, stage = compute_dtype(config, path, document), zero_stage(document)
    batch = plan_batch(config.batch, config.parallel, world_size, where=str(path))
    for section in ("bf16", "fp16"):
        if section in resolved and section != compute:
            del resolved[section]
    if config.precision.loss_scale.policy == "static" and "fp16" in resolved:
        kept = ((key, value) for key, value in resolved["fp16"].items() if key not in _DYNAMIC_ONLY or value != "auto")
        resolved["fp16"] = dict(kept)
    for key, (value, owner) in _owned_values(config, compute, batch).items():
        given = _fill(resolved, key, value)
        if given != value:
            raise UserError(
                f"{path}: {key} = {show(given)} disagrees with the run config, where {owner} gives {show(value)}; "
                'write "auto" in the JSON, or make them the same'
            )
    for key, default in _defaults(resolved, stage).items():
        _fill(resolved, key, default)
    if batch.tensor > 1:
        # the loss needs whole logits, so the head's slices are gathered
        resolved["tensor_parallel"] = {"autotp_size": batch.tensor, "vocab_parallel_lm_head": False}
    left = [key for key, value in leaves(resolved) if value == "auto"]
    if left:
        raise UserError(f'{path}: {left[0]} = "auto" is not decided by the run config; write a value or remove the key')
    return resolved


def compute_dtype(config: Config, path: Path, document: dict[str, Any]) -> Dtype:
    """`fp32`, `bf16` or `fp16`: what the JSON enables and precision.compute agrees with."""
    sixteen_bit: tuple[Dtype, ...] = ("bf16", "fp16")
    flags = {name: document.get(name, {}).get("enabled", False) for name in sixteen_bit}
    wanted = config.precision.compute
    if wanted == "auto":
        for name in [name for name, flag in flags.items() if flag == "auto"]:
            problem = "and precision.compute = auto leave the dtype open; set one of them"
            raise UserError(f'{path}: {name}.enabled = "auto" {problem}')
    enabled = [name for name, flag in flags.items() if flag is True or (flag == "auto" and name == wanted)]
    if len(enabled) == 2:
        raise UserError(f"{path}: bf16.enabled and fp16.enabled are both true; set one of them to false")
    found: Dtype = enabled[0] if enabled else "fp32"
    if wanted not in ("auto", found):
        section = f"enables {found}" if enabled else "enables neither bf16 nor fp16, which is fp32"
        fitting = f"ds_configs/zero{zero_stage(document) or 1}_{wanted}.json"
        raise UserError(
            f"{path}: {section}, but precision.compute = {wanted} in the run config; remove deepspeed.config, or set "
            f"it to a JSON for {wanted} such as {fitting}, or set precision.compute to auto"
        )
    return found


def check_choices(config: Config, path: Path, document: dict[str, Any]) -> None:
    """Raises UserError if deepspeed.stage or deepspeed.offload differs from the JSON."""
    section, stage, kept = config.deepspeed, zero_stage(document), offload(document)
    if section.stage not in (None, stage):
        raise UserError(
            f"{path}: zero_optimization.stage = {stage}, but deepspeed.stage = {section.stage} in the run config; "
            "remove deepspeed.stage or deepspeed.config"
        )
    if section.offload is not None and (section.offload == "none") != (kept == "none"):
        raise UserError(
            f"{path}: offloads {kept}, but deepspeed.offload = {section.offload} in the run config; "
            "remove deepspeed.offload or deepspeed.config"
        )


def _owned_values(config: Config, compute: str, batch: BatchPlan) -> dict[str, tuple[Any, str]]:
    """Dotted key of the JSON to the value that the run config gives it, and the key that decides it."""
    reduce = "fp32" if config.precision.reduce == "fp32" else compute
    ranks = f"{batch.data_ranks} {'groups of ' * (batch.sharing > 1)}processes"
    values: dict[str, tuple[Any, str]] = {
        # DeepSpeed counts a rank that has a slice of a sequence as one with a whole sequence.
        "train_batch_size": (
            batch.global_size * batch.sequence,
            "batch.global_size" + " x parallel.sequence" * (batch.sequence > 1),
        ),
        "train_micro_batch_size_per_gpu": (batch.micro_size, "batch.micro_size"),
        "gradient_accumulation_steps": (batch.accumulation, f"batch.global_size / (batch.micro_size x {ranks})"),
        "gradient_clipping": (config.optimizer.gradient_clipping, "optimizer.gradient_clipping"),
        "communication_data_type": (reduce, "precision.reduce"),
        "data_types.grad_accum_dtype": (config.precision.accumulate, "precision.accumulate"),
    }
    scale, owner = config.precision.loss_scale, "precision.loss_scale"
    if compute != "fp32":
        values[f"{compute}.enabled"] = True, "precision.compute"
    if compute == "bf16":
        values["bf16.check_grad_overflow"] = True, "every skipped step must be seen"
    elif compute == "fp16" and scale.policy == "static":
        values["fp16.loss_scale"] = scale.initial_scale, f"{owner}.initial"
    elif compute == "fp16":  # these only document the run; DeepSpeed reads loss_scale 0 as dynamic
        values |= {
            "fp16.loss_scale": (0, f"{owner}.policy"),
            "fp16.initial_scale_power": (int(math.log2(scale.initial_scale)), f"log2 of {owner}.initial"),
            "fp16.loss_scale_window": (scale.window, f"{owner}.window"),
            "fp16.hysteresis": (scale.tolerated_overflows, f"{owner}.hysteresis"),
            "fp16.min_loss_scale": (int(scale.minimum), f"{owner}.minimum"),
            "fp16.consecutive_hysteresis": (False, "every loss-scale policy"),
        }
    return values


def _defaults(resolved: dict[str, Any], stage: int) -> dict[str, Any]:
    """Dotted key to Mantissa's default where it differs from DeepSpeed's."""
    defaults: dict[str, Any] = {"steps_per_print": _NEVER_PRINT, "wall_clock_breakdown": False}
    # DeepSpeed's timer waits for the device in each forward pass, and its figures are shown nowhere.
    defaults["timers.throughput.enabled"] = False
    if stage:
        # On by default at ZeRO-3, where it has caused wrong gradients more than once.
        defaults["zero_optimization.overlap_comm"] = False
        defaults["zero_allow_untested_optimizer"] = True
    if "optimizer" in offload(resolved):
        # torch's fused AdamW updates masters in host memory as fast as DeepSpeedCPUAdam, and needs no build.
        defaults["zero_force_ds_cpu_optimizer"] = False
    return defaults


def _fill(resolved: dict[str, Any], key: str, default: Any) -> Any:
    """The value of a dotted key, set to `default` if it is absent or "auto"."""
    *parents, name = key.split(".")
    section = resolved
    for parent in parents:
        section = section.setdefault(parent, {})
    if section.get(name, "auto") == "auto":
        section[name] = default
    return section[name]
