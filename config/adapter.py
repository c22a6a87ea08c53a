"""What `peft` is told of an adapter: by the training code, which builds it, and by the planner, which counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from config.errors import UserError, one_line
from config.schema import AdapterSection


def peft_arguments(section: AdapterSection) -> dict[str, Any]:
    """Arguments of a `peft.LoraConfig`."""
    targets = section.target_modules
    return {
        "task_type": "CAUSAL_LM",
        "r": section.r,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "use_rslora": section.rslora,
        "use_dora": section.kind == "dora",
        "target_modules": targets[0] if targets == ("all-linear",) else list(targets),
        "modules_to_save": list(section.modules_to_save) or None,
        "init_lora_weights": "gaussian" if section.init == "gaussian" else True,
    }


def require_modules(section: AdapterSection, names: Iterable[str]) -> None:
    """Refuse names that are of no module; `peft` leaves them out where it finds one of the others.

    names: of the model's modules. Raises UserError.
    """
    known = list(names)
    targets = (name for name in section.target_modules if name != "all-linear")
    absent = [
        *(("target_modules", name) for name in targets if not any(f".{one}".endswith(f".{name}") for one in known)),
        *(("modules_to_save", name) for name in section.modules_to_save if not any(o.endswith(name) for o in known)),
    ]
    if absent:
        key, name = absent[0]
        ends = {one.rpartition(".")[2] for one in known}
        listed = ", ".join(sorted(end for end in ends if end and not end.isdecimal()))
        problem = f"adapter.{key} = {', '.join(getattr(section, key))}: the model has no module {name}"
        raise UserError(f"{problem}; name some of {listed}")


def refused_targets(section: AdapterSection, error: Exception) -> UserError:
    """What to raise where `peft` refuses the target modules."""
    problem = f"adapter.target_modules = {', '.join(section.target_modules)}: {one_line(error)}"
    return UserError(f"{problem}; name modules of the model, such as q_proj and v_proj")
