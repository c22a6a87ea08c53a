"""The precision manifest: a JSON file that says which module computes in FP32, BF16, FP16 or FP8, and why.

docs/manifest.md has its format. A *region* is a module that multiplies matrices itself, or a norm (`find_regions`). The
**last match wins**, as in .gitignore. A rule that matches no region, or that later rules override everywhere, is an
error, since it has no effect. A rule lowers a norm only if it names its `module_class`; otherwise `model.layers.0.*`
would do so by accident. This module only decides; `precision.regions` applies the decision to a model.
"""

import difflib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from config.errors import UserError
from config.json_text import read_object
from config.load import build_section

Compute = Literal["fp32", "bf16", "fp16", "fp8"]
COMPUTES: tuple[str, ...] = get_args(Compute)
NORM_REASON = "norms compute in FP32 unless a rule names their module_class"
ROUTER_REASON = "routers compute in FP32 unless a rule names them"


@dataclass(frozen=True)
class Rule:
    """One rule of the manifest. It applies to a region when every given pattern matches."""

    compute: Compute
    """Dtype of the matching regions."""
    reason: str
    match: str | None = None
    """Glob (`*`, `?`, `[...]`; `*` also crosses dots) over the full module name; None: every name."""
    module_class: str | None = None
    """Glob over the names of the module's class and its base classes; None: every class."""


@dataclass(frozen=True)
class Manifest:
    default: Compute
    """The ambient dtype: that of matmul regions without a rule, and of the outputs of regions."""
    rules: tuple[Rule, ...]
    """Rules in the order of the file; the last match wins."""
    path: Path
    """File that the manifest was read from, for messages."""


@dataclass(frozen=True)
class Assignment:
    """The dtype of one region, and the rule that decided it."""

    compute: Compute
    rule_index: int | None
    """Index into Manifest.rules; None: no rule matched."""
    reason: str


@dataclass(frozen=True)
class _File:
    """The keys of the file, except $schema, which is for editors. loss_scale is read by config/resolved.py."""

    default: Compute
    rules: tuple[Rule, ...] = ()
    loss_scale: int | None = None


RegionKind = Literal["matmul", "attention", "functional", "norm"]


def load_manifest(path: Path) -> Manifest:
    """Read and check a manifest. Raises UserError: one line that names file and key."""
    tree = read_object(path, "precision manifest")
    tree.pop("$schema", None)
    file = build_section(_File, tree, path)
    for index, rule in enumerate(file.rules):
        if rule.match is None and rule.module_class is None:
            raise UserError(f"{path}: rules[{index}] says no module; give match (a name glob), module_class, or both")
        for key in ("match", "module_class", "reason"):
            text = getattr(rule, key)
            if text is not None and not text.strip():
                raise UserError(f"{path}: rules[{index}].{key} = '{text}' is empty; write it in quotes")
    if file.default == "fp8":
        fix = 'set it to bf16, and fp8 by a rule with "module_class": "Linear"'
        raise UserError(f"{path}: default = fp8: only linear layers compute in it, and take other inputs; {fix}")
    if file.loss_scale is not None and (file.loss_scale < 1 or file.loss_scale.bit_count() != 1):
        raise UserError(f"{path}: loss_scale = {file.loss_scale} is not a power of two of 1 or more; write one")
    return Manifest(file.default, file.rules, path)


def find_regions(model: torch.nn.Module) -> dict[str, RegionKind]:
    """Kinds by full name of every module that gets a region, in the order of `named_modules`.

    attention: a module with `Attention` in its class name that has projections below it but no other attention; QK^T
    and PV are its own. functional: one that owns a parameter of two or more dimensions and is not an embedding, such as
    fused experts and routers. norm: a childless module with `Norm` in the name of its class or of a base class.
    """
    found: dict[str, RegionKind] = {}
    inside_fused = ""  # torch's MultiheadAttention uses its projection's weights without calling the projection
    for name, module in model.named_modules():
        if inside_fused and name.startswith(inside_fused):
            continue
        kind = _kind(module)
        if kind is not None:
            found[name] = kind
        if isinstance(module, torch.nn.MultiheadAttention):
            inside_fused = f"{name}."
    return found


def assign(manifest: Manifest, model: torch.nn.Module) -> dict[str, Assignment]:
    """The dtype of every region of `model`, by full module name. Raises UserError for a rule without effect, and for
    fp8 in a module that `can_be_fp8` rules out."""
    modules = dict(model.named_modules())
    regions, routers = find_regions(model), router_regions(model)
    assigned: dict[str, Assignment] = {}
    for name, kind in regions.items():
        wide = NORM_REASON if kind == "norm" else ROUTER_REASON if name in routers else None
        assigned[name] = Assignment("fp32" if wide else manifest.default, None, wide or "default")
    matched: list[list[str]] = []
    for index, rule in enumerate(manifest.rules):
        names = [name for name, kind in regions.items() if _matches(rule, name, modules[name], kind)]
        if not names:
            raise _matches_nothing(manifest, index, modules, regions)
        matched.append(names)
        assigned.update({name: Assignment(rule.compute, index, rule.reason) for name in names})
    for index, names in enumerate(matched):
        winners = {assigned[name].rule_index for name in names}
        if index not in winners:
            over = ", ".join(
                f"rules[{winner}]" for winner in sorted(winner for winner in winners if winner is not None)
            )
            raise UserError(
                f"{_where(manifest, index)} has no effect: {over} below overrides it everywhere, because the last "
                f"match wins; put the general rule first, or remove this one"
            )
    for name, given in assigned.items():
        if given.compute == "fp8" and not can_be_fp8(model, name):
            assert given.rule_index is not None, "fp8 is no default"
            other = f"it also matches {name}, a {type(modules[name]).__name__}"
            fix = 'narrow it with "module_class": "Linear", or give that module another rule below'
            raise UserError(f"{_where(manifest, given.rule_index)}: {FP8_FOR}, and {other}; {fix}")
    return assigned


def is_router(module: torch.nn.Module) -> bool:
    """Whether a module routes tokens to experts: its class name says so."""
    return _ROUTER.search(type(module).__name__) is not None


_ROUTER = re.compile(r"router|topkgating|moe(v1)?gate$", re.IGNORECASE)
"""The second is JetMoe's, the third DeepSeek's own code's and Hunyuan's."""


def router_regions(model: torch.nn.Module) -> dict[str, str]:
    """The regions that multiply by routers' weights, to the routers: these themselves, or linear layers inside."""
    routers = [name for name, module in model.named_modules() if is_router(module)]
    found: dict[str, str] = {}
    for name, kind in find_regions(model).items():
        around = next((router for router in routers if f"{name}.".startswith(f"{router}.")), None)
        if around is not None and kind in ("matmul", "functional"):
            found[name] = around
    return found


FP8_FOR = "fp8 is for linear layers other than the output embedding"


def can_be_fp8(model: torch.nn.Module, name: str) -> bool:
    """Whether a module is a plain linear layer other than the output embedding, whose logits feed the loss."""
    module: Any = model.get_submodule(name)
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    plain = isinstance(module, torch.nn.Linear) and type(module).forward is torch.nn.Linear.forward
    return plain and module is not head


def nearest(name: str, known: Iterator[str] | list[str] | tuple[str, ...]) -> str:
    """`; did you mean ...?` with the names nearest to `name`, or nothing."""
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else ""


def _kind(module: torch.nn.Module) -> RegionKind | None:
    classes = _class_names(module)
    convolution = isinstance(module, torch.nn.modules.conv._ConvNd)
    if isinstance(module, torch.nn.Linear) or convolution or type(module).__name__ == "Conv1D" or is_slice(module):
        return "matmul"
    if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
        return None
    childless = next(module.children(), None) is None
    if childless and any("Norm" in name for name in classes):
        return "norm"
    if isinstance(module, torch.nn.MultiheadAttention) or _is_attention(module):
        return "attention"
    # ZeRO-3 leaves an empty tensor in place of a partitioned parameter and keeps the shape in ds_shape.
    shapes = (getattr(parameter, "ds_shape", parameter.shape) for parameter in module.parameters(recurse=False))
    return "functional" if any(len(shape) >= 2 for shape in shapes) else None


def _is_attention(module: torch.nn.Module) -> bool:
    if "Attention" not in type(module).__name__:
        return False
    below = list(module.modules())[1:]
    return any(_kind(child) == "matmul" for child in below) and not any(
        "Attention" in type(child).__name__ for child in below
    )


def is_slice(module: torch.nn.Module) -> bool:
    """Whether a module is DeepSpeed AutoTP's slice of a linear layer. Recognised by name, because only training/
    imports DeepSpeed. AutoTP's embeddings have the same base class."""
    names = [kind.__name__ for kind in type(module).__mro__]
    return "TensorParallel_Layer" in names and not any("Embedding" in name for name in names)


def _class_names(module: torch.nn.Module) -> list[str]:
    """Names of a module's classes; a slice of a linear layer also has nn.Linear's, so that rules match both."""
    names = [kind.__name__ for kind in type(module).__mro__ if kind not in (torch.nn.Module, object)]
    return [*names, torch.nn.Linear.__name__] if is_slice(module) else names


def without_adapter(name: str) -> str:
    """The module that an adapter's part is in: `...q_proj` for `...q_proj.base_layer` or `...q_proj.lora_A.default`."""
    return _PART_OF_ADAPTER.sub("", name)


_PART_OF_ADAPTER = re.compile(r"\.(base_layer|original_module|modules_to_save\.\w+|lora_\w+\.\w+)$")


def _matches(rule: Rule, name: str, module: torch.nn.Module, kind: RegionKind) -> bool:
    matches = any(fnmatchcase(known, rule.match or "*") for known in (name, without_adapter(name)))
    if rule.compute == "fp8" and ".lora_" in name and "lora_" not in (rule.match or ""):
        return False  # the factors' matmuls cost a few percent of the base's, and hold all that is learnt
    if rule.module_class is None:
        return kind != "norm" and matches
    return matches and any(fnmatchcase(class_name, rule.module_class) for class_name in _class_names(module))


def _matches_nothing(
    manifest: Manifest, index: int, modules: dict[str, torch.nn.Module], regions: dict[str, RegionKind]
) -> UserError:
    rule, where = manifest.rules[index], _where(manifest, index)
    named = [name for name in modules if fnmatchcase(name, rule.match or "*")]
    if rule.match is not None and not named:
        return UserError(f"{where} matches no module{nearest(rule.match, list(regions))}")
    if rule.module_class is not None:
        there = list(dict.fromkeys(type(modules[name]).__name__ for name in named if name in regions))
        shown = f"{nearest(rule.module_class, there)}; there are {', '.join(there)}" if there else ""
        return UserError(f"{where} matches no module that computes{shown}")
    if any(regions.get(name) == "norm" for name in named):
        return UserError(f"{where} matches only norms, which stay FP32; name their module_class to change that")
    return UserError(
        f"{where} matches {named[0]}, a {type(modules[named[0]]).__name__} without matmuls of its own; "
        f"write {rule.match}.* for what is inside it"
    )


def _where(manifest: Manifest, index: int) -> str:
    rule = manifest.rules[index]
    given = [f"{key} = '{getattr(rule, key)}'" for key in ("match", "module_class") if getattr(rule, key) is not None]
    return f"{manifest.path}: rules[{index}] ({', '.join(given)} to {rule.compute})"
