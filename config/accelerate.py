"""What `accelerate launch` was told about training, which a run must not contradict without a word.

Accelerate hands its config to the processes in ACCELERATE_* variables (utils/launch.py of Accelerate 1.15), for an
`Accelerator` object to act upon. There is none here, so what such a variable says is taken or checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from config.errors import UserError

_OTHERS = {
    "ACCELERATE_USE_FSDP": "distributed_type = FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "distributed_type = MEGATRON_LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "parallelism_config",
}


def deepspeed_config_file(environment: Mapping[str, str]) -> str | None:
    """The DeepSpeed JSON that Accelerate's config names, as written there; None without one."""
    return environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE") or None


def without_accelerate(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for a run whose config was resolved earlier: what Accelerate says was heeded then."""
    return {name: value for name, value in environment.items() if not name.startswith("ACCELERATE_")}


def check_agreement(environment: Mapping[str, str], source: str, deepspeed: Mapping[str, Any], precision: str) -> None:
    """Refuse a run that does not do what Accelerate was told; what says `auto` or nothing contradicts nothing.

    Args:
        environment: of this process.
        source: what decided how the run trains, for the message.
        deepspeed: the resolved DeepSpeed JSON.
        precision: fp32, bf16, fp16, or `manifest` when a manifest decides module by module.

    Raises:
        UserError: the first contradiction, with both sides of it.
    """
    for name, what in _OTHERS.items():
        if environment.get(name) == "true":
            problem = "is not what train.py does: it trains with DeepSpeed's ZeRO"
            raise UserError(f"accelerate: {what} {problem}; use a file of launch/accelerate/")
    for key, told, truth in _said(environment, deepspeed, precision):
        if told != truth and not _same_number(told, truth):
            raise UserError(
                f"accelerate: {key} = {told}, but by {source} it is {truth}; remove {key} from Accelerate's config, "
                "or make them agree"
            )


def _said(
    environment: Mapping[str, str], deepspeed: Mapping[str, Any], precision: str
) -> Iterator[tuple[str, str, str]]:
    """Key, Accelerate's value and the run's value, of all that Accelerate was told."""
    told = environment.get("ACCELERATE_MIXED_PRECISION", "no")
    # `no` also stands for nothing said; a config file's own `no` is told apart by its name among the fields.
    if told != "no" or "mixed_precision" in environment.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(","):
        yield "mixed_precision", told, "no" if precision == "fp32" else precision
    zero = deepspeed.get("zero_optimization", {})
    truths = {
        "DEEPSPEED_ZERO_STAGE": zero.get("stage", 0),
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": zero.get("offload_optimizer", {}).get("device", "none"),
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": zero.get("offload_param", {}).get("device", "none"),
        "GRADIENT_ACCUMULATION_STEPS": deepspeed["gradient_accumulation_steps"],
        "GRADIENT_CLIPPING": deepspeed["gradient_clipping"],
    }
    for name, truth in truths.items():
        told = environment.get(f"ACCELERATE_{name}", "auto")
        if told != "auto":
            yield name.removeprefix("DEEPSPEED_").lower(), told, str(truth)


def _same_number(one: str, other: str) -> bool:
    try:
        return float(one) == float(other)
    except ValueError:
        return False
