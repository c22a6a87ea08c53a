"""Where a run starts, compared with what transformers alone loads or draws.

Run, reference and oracle build their model by the same code, so that a tensor that it leaves as it was initialised, a
lost key of the config or another spread of new weights would be alike in all of them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import transformers

from config.schema import Config
from config.task import model_class_of
from modeling.quantised_base import quantised_parameters

_SURE = 6.0
"""Standard errors beyond which chance is no explanation."""
_COMPUTES = ("rope", "theta", "_eps", "epsilon", "act", "cap", "scal", "multiplier", "window", "layer_types", "chunk")
"""Parts of the names of the keys that say how an architecture computes; tasks and tokenizers change others."""


def unlike_transformers(model: Any, config: Config) -> Iterator[str]:
    """Parameters of the base, and keys of its config, that are not those of transformers alone. model: in FP32."""
    name, trusted = config.model.name_or_path, config.model.trust_remote_code
    auto = getattr(transformers, model_class_of(config))
    loud = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()  # no table of what a new head lacks
    try:
        with torch.random.fork_rng(devices=[]):
            if name is None:
                other = auto.from_config(copy.deepcopy(model.config), dtype=torch.float32, trust_remote_code=trusted)
            else:
                options = {"dtype": torch.float32, "trust_remote_code": trusted, "ignore_mismatched_sizes": True}
                other = auto.from_pretrained(name, **options)
    finally:
        transformers.logging.set_verbosity(loud)
    own = model.config.get_text_config().to_dict()
    for key, value in other.config.get_text_config().to_dict().items():
        decided = key not in config.model.config and any(part in key for part in _COMPUTES)
        if name is not None and decided and plain(own.get(key)) != plain(value):
            yield f"config.{key} = {own.get(key)}, not {value}"
    theirs, drawn = dict(other.named_parameters()), getattr(model, "drawn", ())
    codes = quantised_parameters(model)
    for key, parameter in model.named_parameters():
        a, b = parameter.detach().float(), theirs.get(key)
        if b is None or a.shape != b.shape or id(parameter) in codes:  # the shape of a task's head
            continue
        b = b.detach().float()
        if unlike(a, b) if name is None or key in drawn else not torch.equal(a, b):
            yield key


def unlike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors, drawn by other numbers, have another mean or spread."""
    spread, chance = float(b.std()), _SURE * a.numel() ** -0.5
    if not spread:
        return not torch.equal(a, b)
    return abs(float(a.std()) / spread - 1) > chance or abs(float(a.mean() - b.mean())) > 2 * chance * spread


def plain(value: Any) -> Any:
    """The value, with lists in place of tuples, as JSON has them."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list | tuple) else value
