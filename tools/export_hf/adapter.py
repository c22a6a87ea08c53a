"""An adapter as a folder of `peft`, or merged into its base.

The merge is computed in FP32 from the masters and rounded once. The base is rounded to the run's compute dtype, or
keeps the values of its files; a 4-bit or 8-bit base is dequantised. An update smaller than half a unit in the last
place of a weight is lost, so the loss is measured.
"""

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig, PreTrainedModel

from config.errors import UserError, one_line
from config.files import flush
from config.schema import Config
from config.task import model_class_of
from modeling.adapter import NAME, adapter_config, base_name, layers_with_factors
from modeling.build import build_model
from precision.dtypes import DTYPES
from tools.dequantise import dequantise
from tools.export_hf.gap import figures, figures_in_words, in_own_memory, row_gap, summary
from tools.export_hf.rows import Row, rows_of_run
from tools.export_hf.tensors import TensorsDiffer, rounded
from training.checkpoint.partitions import SavedModel, SavedTensor

WEIGHTS = "adapter_model.safetensors"


def write_adapter(
    saved: SavedModel, config: Config, skeleton: PreTrainedModel, folder: Path, dtype: torch.dtype
) -> None:
    """Write the adapter's rounded masters and its config in peft's format. Raises TensorsDiffer.

    skeleton: the base without values.
    """
    from peft import get_peft_model

    whole = whole_modules(trained(saved))
    tensors: dict[str, torch.Tensor] = {}
    for name in trained(saved):
        value = rounded(name, saved.tensors[name].read(), dtype)
        tensors |= dict.fromkeys(_names_in_file(name, skeleton, whole), value)
    # safetensors needs two tensors for a weight with two names
    own_memory = {key: tensor.clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    save_file(own_memory, folder / WEIGHTS, metadata={"format": "pt"})
    flush(folder / WEIGHTS)
    found = load_file(folder / WEIGHTS)
    for key, tensor in tensors.items():
        if key not in found or not torch.equal(found[key], tensor):
            raise TensorsDiffer(f"{key} in {WEIGHTS} is not what was written")
    given = adapter_config(config.adapter, skeleton, model_class=model_class_of(config), whole=whole)
    # what all-linear means is found here, as `peft` itself does: another version might find other modules
    own = get_peft_model(copy.deepcopy(skeleton), given).peft_config[NAME]
    own.base_model_name_or_path, own.inference_mode = config.model.name_or_path, True
    for key in ("target_modules", "target_parameters"):
        setattr(own, key, sorted(getattr(own, key) or []) or None)
    own.save_pretrained(folder)


def _names_in_file(name: str, skeleton: PreTrainedModel, whole: list[str]) -> list[str]:
    """A trained parameter's names in the file: all the names it is tied under, if its module is trained in full."""
    first = [peft_name(name)]
    module = next((one for one in whole if name.startswith(f"{one}.")), None)
    if module is None:
        return first
    every, own = dict(skeleton.named_parameters(remove_duplicate=False)), base_name(name)
    same = [key for key, value in every.items() if value is every[own] and key.startswith(f"{module}.")]
    return list(dict.fromkeys([*first, *map(peft_name, same)]))


def whole_modules(names: Iterable[str]) -> list[str]:
    """The modules that an adapter trains in full, found from the names of its trained parameters."""
    ends = f".modules_to_save.{NAME}."
    return sorted({name.partition(ends)[0] for name in names if ends in name})


def peft_name(name: str) -> str:
    """A trained parameter's name in a peft file."""
    name = name.replace(f".modules_to_save.{NAME}", "").replace(f".{NAME}", "")
    return "base_model.model." + name.replace(".lora_magnitude_vector.weight", ".lora_magnitude_vector")


def trained(saved: SavedModel) -> list[str]:
    """Names of the trained parameters; a shared layer's under its first name."""
    return [name for name in saved.tensors if name not in saved.frozen]


@dataclass(frozen=True)
class Merged:
    """A merged model, and the effect of rounding on it."""

    saved: SavedModel
    """FP32 weights of the merged model in place of a checkpoint's."""
    facts: dict[str, Any]
    tied: bool
    """Whether its embedding and its output head are still tied; a head trained as a copy is not."""


@torch.no_grad()
def merge(
    saved: SavedModel,
    config: Config,
    shape: PretrainedConfig,
    *,
    dtype: torch.dtype,
    corpus: Path,
    base_dtype: torch.dtype | None,
) -> Merged:
    """Base + adapter in FP32, whole in this process's memory.

    shape: the config of the run's model. dtype: the export's, for the rounding error. corpus: the run's prepared data;
    if it is gone, the error on its rows is omitted. base_dtype: dtype that the base is rounded to first; None: the
    run's compute dtype. Raises UserError if the base cannot be loaded or is another than the adapter was trained on.
    """
    from peft import get_peft_model

    name, model_class = str(config.model.name_or_path), model_class_of(config)
    base = _base(config, shape, base_dtype or DTYPES[str(config.precision.compute)])
    quantised = _as_computed(base, config, shape)
    own = adapter_config(config.adapter, base, model_class=model_class, whole=whole_modules(trained(saved)))
    wrapped = get_peft_model(base, own, autocast_adapter_dtype=False)
    adapted: Any = wrapped.get_base_model()
    parameters = dict(adapted.named_parameters())
    for key in trained(saved):
        if key not in parameters or parameters[key].shape != saved.tensors[key].shape:
            raise UserError(f"{name}: has no {key} of the checkpoint's shape; it is not the base that was trained on")
        parameters[key].copy_(saved.tensors[key].read())
    _untie_adapted(adapted)
    before = {
        weight: getattr(layer.get_base_layer(), weight.rpartition(".")[2]).clone()
        for weight, layer in layers_with_factors(adapted).items()
    }
    rows = rows_of_run(corpus, config)
    adapted.eval()
    exact = [adapted(**row.inputs).logits for row in rows]
    model: Any = wrapped.merge_and_unload(safe_merge=True)
    # each copy is freed here: the comparison on rows makes another copy of the model
    lost = {
        weight.removesuffix(".weight"): _loss_of_rounding(before.pop(weight), model.get_parameter(weight), dtype)
        for weight in list(before)
    }
    facts: dict[str, Any] = {
        "layers": len(lost),
        "lost by rounding": {layer: share for layer, (share, _) in sorted(lost.items(), key=lambda item: -item[1][0])},
        "weights that did not change": sum(kept for _, kept in lost.values()) / max(len(lost), 1),
    }
    if rows:
        facts |= {"unit": rows[0].unit, "rows": len(rows)}
        facts |= _apart(exact, model, rows, lambda name, weight: weight.to(dtype).float())
    if config.adapter.base != "compute":
        floats = {f"{name}.weight": difference for name, difference in quantised.items()}
        original = _apart(exact, model, rows, lambda name, weight: weight + floats.get(name, 0.0))
        facts |= {"base": config.adapter.base, "on the base in floats": original}
    tensors = {key: SavedTensor(value.shape, value.detach) for key, value in model.named_parameters()}
    for key, value in model.named_parameters(remove_duplicate=False):  # a weight with two names is two tensors in files
        tensors.setdefault(key, SavedTensor(value.shape, value.detach().clone))
    tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
    buffers = {key: value for key, value in model.state_dict().items() if key not in tensors}
    whole = SavedModel(stage=saved.stage, ranks=saved.ranks, tensors=tensors, buffers=buffers)
    return Merged(whole, facts, tied)


def _base(config: Config, shape: PretrainedConfig, dtype: torch.dtype) -> Any:
    """The base's files, rounded to a dtype and converted to FP32. Raises UserError."""
    name, model_class = str(config.model.name_or_path), model_class_of(config)
    options = {"dtype": dtype, "trust_remote_code": config.model.trust_remote_code}
    try:
        # the base's own head, if its number of labels differs, is replaced by the adapter's
        base = getattr(transformers, model_class).from_pretrained(
            name, config=copy.deepcopy(shape), ignore_mismatched_sizes=True, **options
        )
    except (OSError, ValueError) as error:
        raise UserError(f"model.name_or_path = {name}: the base cannot be loaded ({one_line(error)})") from error
    return in_own_memory(base.float())


def _as_computed(base: Any, config: Config, shape: PretrainedConfig) -> dict[str, torch.Tensor]:
    """Replace a 4-bit or 8-bit base's weights in place by their dequantised values, which the adapter was trained on.

    Returns the difference from the weights in the files, by layer name. Raises UserError.
    """
    if config.adapter.base == "compute":
        return {}
    model = build_model(config.model, copy.deepcopy(shape), seed=0, adapter=config.adapter)
    taken = {}
    for name in dequantise(model, computed_in=DTYPES[str(config.precision.compute)]):
        weight, stands_for = base.get_submodule(name).weight, model.get_submodule(name).weight
        if type(base.get_submodule(name)).__name__ == "Conv1D":
            stands_for = stands_for.T
        taken[name] = weight - stands_for
        weight.copy_(stands_for)
    return taken


def _untie_adapted(adapted: Any) -> None:
    """Give each layer with factors a weight of its own: `peft` merges in place, which changes a tied weight twice."""
    names = Counter(id(value) for _, value in adapted.named_parameters(remove_duplicate=False))
    for weight, layer in layers_with_factors(adapted).items():
        owner, own = layer.get_base_layer(), weight.rpartition(".")[2]
        value = getattr(owner, own)
        if names[id(value)] > 1:
            setattr(owner, own, torch.nn.Parameter(value.clone(), requires_grad=False))
            adapted.config.get_text_config().tie_word_embeddings = adapted.config.tie_word_embeddings = False


def _apart(
    exact: Sequence[torch.Tensor],
    model: PreTrainedModel,
    rows: Sequence[Row],
    change: Callable[[str, torch.Tensor], torch.Tensor],
) -> dict[str, float]:
    """How far a copy of the merged model is from base and adapter on these rows, in FP32; empty without rows.

    exact: base and adapter's logits. change: a weight of the copy, from its name and the merged one.
    """
    if not rows:
        return {}
    other: Any = copy.deepcopy(model)
    for name, parameter in other.named_parameters():
        parameter.copy_(change(name, parameter))
    outputs = (SimpleNamespace(logits=logits) for logits in exact)
    found = figures(summary([row_gap(lambda **inputs: next(outputs), other, row) for row in rows]))
    return {key.removesuffix(" difference"): value for key, value in found.items()}


def words_of(facts: dict[str, Any], dtype: str) -> list[str]:
    """Console lines on what a merge lost."""
    worst = next(iter(facts["lost by rounding"].items()), ("", 0.0))
    lines = [
        f"merged {facts['layers']} layers in FP32; rounding to {dtype} lost {worst[1]:.2%} of the update of "
        f"{worst[0]}, the most of any; {facts['weights that did not change']:.1%} of the adapted weights did not change"
    ]
    if "rows" in facts:
        gap = figures_in_words({**facts, "largest difference": facts["largest"]})
        lines.append(f"on {facts['rows']} rows, against base and adapter in FP32: {gap}")
    if "base" in facts:
        other = facts["on the base in floats"]
        apart = f": KL {other['kl']:.3g} nats a token, largest {other['largest']:.3g}" if other else ""
        lines.append(
            f"merged into the weights that the codes of adapter.base = {facts['base']} stand for, which it was trained "
            f"on; on those in the base's files the same adapter computes something else{apart}"
        )
    if worst[1] > 0.5:
        lines.append("more than half of an update was lost: export in fp32 or fp16, or the adapter by itself")
    return lines


def _loss_of_rounding(base: torch.Tensor, merged: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """||round(W') - W'|| / ||W' - W||, and the share of weights whose rounded value is the base's."""
    written = merged.to(dtype).float()
    update = float((merged - base).double().norm())
    error = float((written - merged).double().norm())
    share = error / update if update else 0.0
    return share, float((written == base.to(dtype).float()).double().mean())
