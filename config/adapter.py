"""What `peft` is told of an adapter: by the training code, which builds it, and by the planner, which counts it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from config.errors import UserError, one_line
from config.schema import AdapterSection
from config.task import CAUSAL_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION

CLASSIFIERS = ("classifier", "score")
"""Names of the head that makes a classifier's logits, as `peft` has them."""


_TASK_TYPES = {
    CAUSAL_LM: "CAUSAL_LM",
    SEQ2SEQ_LM: "SEQ_2_SEQ_LM",
    SEQUENCE_CLASSIFICATION: "SEQ_CLS",
    TOKEN_CLASSIFICATION: "TOKEN_CLS",
}
"""That `peft` has a class for, by the model's class."""


def peft_arguments(
    section: AdapterSection, *, model_class: str = CAUSAL_LM, whole: Sequence[str] | None = None
) -> dict[str, Any]:
    """Arguments of a `peft.LoraConfig`.

    model_class: of config/task.py. whole: names of the modules that are trained whole, into which `peft` puts no
    factors; None: `modules_to_save`.
    """
    targets, whole = section.target_modules, list(section.modules_to_save if whole is None else whole)
    return {
        "task_type": _TASK_TYPES.get(model_class),
        "r": section.r,
        "lora_alpha": section.alpha,
        "lora_dropout": section.dropout,
        "use_rslora": section.rslora,
        "use_dora": section.kind == "dora",
        "target_modules": targets[0] if targets == ("all-linear",) else list(targets),
        "modules_to_save": whole or None,
        "init_lora_weights": "gaussian" if section.init == "gaussian" else True,
    }


def trained_whole(section: AdapterSection, model: Any, *, model_class: str, drawn: Iterable[str] = ()) -> list[str]:
    """Names of the modules that are trained beside the factors: `modules_to_save`, and what the base's files lack.

    A classifier's head is always among them, as in `peft`. drawn: names of parameters that the base's files lack, which
    would stay as they were drawn, and which nobody has who loads the adapter. Of each the largest module is taken of
    which they lack all. Raises UserError for one that shares its module with others.
    """
    found = list(section.modules_to_save)
    if model_class in (SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION):
        found += [name for name in CLASSIFIERS if hasattr(model, name)]
    lacking = set(drawn)
    own = {id(item) for name, item in model.named_parameters() if name in lacking}
    for name in sorted(lacking):
        owners = [name.rsplit(".", depth)[0] for depth in range(1, name.count(".") + 1)]
        if any(owner.endswith(one) for owner in owners for one in found):
            continue
        whole = [one for one in owners if all(id(item) in own for item in model.get_submodule(one).parameters())]
        if not whole:
            raise UserError(
                f"model.name_or_path has no {name}, which an adapter would leave as it was drawn; name its module "
                f"{owners[0] if owners else name} in adapter.modules_to_save, or give a model that has it"
            )
        found.append(whole[-1])
    return list(dict.fromkeys(found))


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


def head_weights(model: Any) -> set[int]:
    """ids of the parameters of the layer that makes the logits, those of a copy that `peft` trains among them.

    A causal or masked language model's layer is its output embedding. A classifier's is the last one in its head.
    """
    get = getattr(model, "get_output_embeddings", None)
    head = get() if get is not None else None
    if head is None:
        head = next((getattr(model, name) for name in CLASSIFIERS if hasattr(model, name)), None)
    if head is None:
        return set()
    copies = getattr(head, "modules_to_save", None)
    heads = [head] if copies is None else [head.original_module, *copies.values()]
    own = (getattr(one, "base_layer", one) for one in heads)
    return {id(parameter) for one in own for parameter in _last_layer(one)}


def _last_layer(module: Any) -> list[Any]:
    """Parameters of the last layer in a module that has some."""
    layers = [list(layer.parameters(recurse=False)) for layer in module.modules()]
    return next((layer for layer in reversed(layers) if layer), [])
