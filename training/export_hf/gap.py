"""The train-inference gap: how far an export's log-probabilities are from those of the FP32 masters.

Rounding weights is one part of it, computing in 16 bits the other. Both models read the same rows; log-probabilities
are taken in FP64 from the logits of each. At every token: KL(masters || export) in nats over the vocabulary, the
largest difference of any log-probability, and that of the token that follows in the row, whose exponential is the
importance ratio of reinforcement learning. Of an encoder-decoder the tokens are those of a row's target.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from data.loader import IGNORED_LABEL
from training.checkpoint.partitions import SavedModel
from training.export_hf.rows import ROWS, Row
from training.export_hf.tensors import TensorsDiffer, untie
from training.parity.outputs import OutputErrors

_CHUNK = 64
"""[tokens] Of which log-probabilities are in memory at once."""
_MODULES = 5
"""Modules that are named, those of the largest own error."""


class GapTooLarge(TensorsDiffer):
    """The export computes other log-probabilities than the masters do, by more than was allowed."""


@dataclass(frozen=True)
class Bounds:
    """What is allowed at any token; None: anything finite."""

    kl: float | None = None
    """[nats] Of KL(masters || export)."""
    difference: float | None = None
    """[nats] Of a log-probability."""


@dataclass(frozen=True)
class Comparison:
    """What `--compare-logits` and its further options ask for."""

    data: str = ""
    """A run config or a file (`rows_of_data`); empty: the run's own held-out data."""
    rows: int = ROWS
    bounds: Bounds = Bounds()


@dataclass(frozen=True)
class RowGap:
    """Two models on one row, place by place, float64; inf where one is not finite."""

    kl: torch.Tensor
    """(m,) [nats]"""
    difference: torch.Tensor
    """(m,) [nats] The largest of any log-probability."""
    of_label: torch.Tensor
    """(m or fewer,) [nats] Of the log-probability of the label, at the places that have one."""
    places: torch.Tensor
    """(m,) int64: those of the row."""


@torch.no_grad()
def row_gap(exact: Any, found: Any, row: Row) -> RowGap:
    """exact, found: models of one class over the same vocabulary, each in its own dtype."""
    ours, theirs = (model(**row.inputs).logits[0] for model in (exact, found))
    parts: list[torch.Tensor] = []
    for places, labels in zip(row.places.split(_CHUNK), row.labels.split(_CHUNK), strict=True):
        p, q = (torch.log_softmax(logits[places].double(), dim=-1) for logits in (ours, theirs))
        distance = (p - q).abs()
        of_label = distance.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        kl = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0.0)
        parts.append(torch.stack([kl, distance.amax(dim=-1), of_label], dim=1))
    kl, difference, of_label = torch.cat(parts).nan_to_num(nan=math.inf, posinf=math.inf).unbind(dim=1)
    return RowGap(kl, difference, of_label[row.labels != IGNORED_LABEL], row.places)


def summary(gaps: Sequence[RowGap]) -> dict[str, Any]:
    """Of several rows: mean and largest."""
    kl, difference = torch.cat([gap.kl for gap in gaps]), torch.cat([gap.difference for gap in gaps])
    of_label = torch.cat([gap.of_label for gap in gaps])
    return {
        "rows": len(gaps),
        "tokens": len(kl),
        "kl": float(kl.mean()),
        "largest kl": float(kl.max()),
        "largest difference": float(difference.max()),
        "largest difference of the row's tokens": float(of_label.max()) if len(of_label) else 0.0,
    }


def measure(
    exact: Any, folder: Path, rows: Sequence[Row], *, model_class: str, trust_remote_code: bool
) -> dict[str, Any]:
    """The gap of an exported folder, which computes in its own dtype as `from_pretrained` loads it.

    exact: the masters' model (`of_masters`), FP32. model_class: of config/task.py. `of rounding alone` is the same with
    the export's weights computing in FP32. `modules`: on the row of the largest KL, by the error of the module's own
    output on the export's inputs, against FP32 (training/parity/outputs.py).
    """
    auto = getattr(transformers, model_class)
    found: Any = auto.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code).eval()
    gaps = [row_gap(exact, found, row) for row in rows]
    worst = max(range(len(rows)), key=lambda number: float(gaps[number].kl.max()))
    facts = summary(gaps)
    facts["worst"] = {"row": worst, "position": int(gaps[worst].places[gaps[worst].kl.argmax()])}
    facts["by position"] = dict(_by_position(gaps))
    facts["modules"] = _modules(exact, found, rows[worst])
    rounded = summary([row_gap(exact, found.float(), row) for row in rows])
    facts["of rounding alone"] = {key: rounded[key] for key in ("kl", "largest kl", "largest difference")}
    return facts


def of_masters(saved: SavedModel, shape: PretrainedConfig, *, model_class: str, trust_remote_code: bool) -> Any:
    """The model of a checkpoint with its masters as weights, FP32, whole in this process's memory.

    model_class: of config/task.py.
    """
    auto = getattr(transformers, model_class)
    with no_init_weights():
        model: Any = auto.from_config(shape, dtype=torch.float32, trust_remote_code=trust_remote_code)
    model.tie_weights()
    untie(model, saved)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(saved.tensors[name].read())
        buffers = dict(model.named_buffers())
        for name, value in saved.buffers.items():
            buffers[name].copy_(value)
    return model.eval()


def require_within(facts: Mapping[str, Any], bounds: Bounds) -> None:
    """Raises GapTooLarge, naming the module of the largest own error, where a bound is broken or a value not finite."""
    checks = (
        ("KL", "largest kl", bounds.kl),
        ("difference of a log-probability", "largest difference", bounds.difference),
    )
    for what, key, bound in checks:
        if not facts[key] <= (math.inf if bound is None else bound) or math.isinf(facts[key]):
            where, module = facts["worst"], next(iter(facts["modules"]), {"module": "no module", "own error": 0.0})
            allowed = "is not finite" if math.isinf(facts[key]) else f"is above the bound {bound:g}"
            raise GapTooLarge(
                f"the largest {what} between export and masters, {facts[key]:.3g} nats, {allowed} (largest KL in row "
                f"{where['row']}, position {where['position']}); {module['module']} has the largest error of its own, "
                f"{module['own error']:.2%}"
            )


def words_of(facts: Mapping[str, Any], dtype: str) -> list[str]:
    """The gap as lines for the console."""
    rounding, largest = facts["of rounding alone"], facts["largest difference"]
    seen = f"{facts['rows']} rows, {facts['tokens']} tokens"
    following = facts["largest difference of the row's tokens"]
    lines = [
        f"{dtype} against the FP32 masters on {seen}: KL {facts['kl']:.3g} nats a token, {facts['largest kl']:.3g} at "
        f"most; largest difference of a log-probability {largest:.3g}, of a token of the rows {following:.3g}",
        f"of rounding the weights alone: KL {rounding['kl']:.3g} nats a token, largest difference "
        f"{rounding['largest difference']:.3g}",
        "KL by position: " + ", ".join(f"{where} {gap['kl']:.3g}" for where, gap in facts["by position"].items()),
    ]
    named = [f"{entry['module']} {entry['own error']:.2%}" for entry in facts["modules"]]
    return [*lines, "largest errors of modules' own outputs: " + ", ".join(named)]


def _by_position(gaps: Sequence[RowGap]) -> Iterator[tuple[str, dict[str, float]]]:
    """By ranges of positions that double: 0, 1, 2-3, 4-7 and so on."""
    kl, difference = torch.cat([gap.kl for gap in gaps]), torch.cat([gap.difference for gap in gaps])
    places = torch.cat([gap.places for gap in gaps])
    start, end, last = 0, 1, int(places.max())
    while start <= last:
        inside = (places >= start) & (places < end)
        name = str(start) if min(end - 1, last) == start else f"{start}-{min(end - 1, last)}"
        yield name, {"kl": float(kl[inside].mean()), "largest difference": float(difference[inside].max())}
        start, end = end, 2 * end


def _modules(exact: Any, found: Any, row: Row) -> list[dict[str, Any]]:
    errors = OutputErrors(exact, found)
    with torch.no_grad(), errors.of_reference():
        exact(**row.inputs)
    with torch.no_grad(), errors.of_candidate():
        found(**row.inputs)
    measured = errors.measured()
    worst = sorted(measured["order"], key=lambda name: -measured["own_error"][name])[:_MODULES]
    return [
        {"module": name, "own error": measured["own_error"][name], "output error": measured["output_error"][name]}
        for name in worst
    ]
