"""The train-inference gap: how far an export's log-probabilities are from those of the FP32 masters.

Both models read the same rows; log-probabilities are taken in FP64 from the logits of each. At every token: KL(masters
|| export) in nats over the vocabulary, the largest difference of any log-probability, and that of the next token.
docs/export.md says which positions are compared for other tasks; predicted numbers are compared by their difference.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig
from transformers.initialization import no_init_weights

from data.batches.loader import IGNORED_LABEL
from tools.export_hf.outputs import output_errors
from tools.export_hf.rows import ROWS, Row
from tools.export_hf.tensors import TensorsDiffer, untie
from training.checkpoint.partitions import SavedModel

_CHUNK = 64
"""[tokens] Log-probabilities of this many are in memory at once."""
_MODULES = 5
"""Number of modules named, those with the largest own error."""
_NONE = 1e-9
"""[nats, or the number's unit] Slack of the bound on the mean gap, above FP64's rounding of log-probabilities."""


class GapTooLarge(TensorsDiffer):
    """The export's log-probabilities or numbers differ from the masters' by more than is allowed."""


@dataclass(frozen=True)
class Bounds:
    """Bounds at any token or label, or for any number; None: anything finite is allowed."""

    kl: float | None = None
    """[nats] Bound on KL(masters || export)."""
    difference: float | None = None
    """[nats] Bound on the difference of a log-probability; for a predicted number, in its unit."""
    ratio: float = 1.5
    """Bound on the mean gap relative to that of the masters rounded once and computing in the export's dtype."""


@dataclass(frozen=True)
class Comparison:
    """The request of `--compare-logits` and its further options."""

    data: str = ""
    """A run config or a file (`rows_of_data`); empty: the run's own held-out data."""
    rows: int = ROWS
    bounds: Bounds = Bounds()


@dataclass(frozen=True)
class RowGap:
    """The gap of two models on one row by position, float64; inf where a value is not finite."""

    row: Row
    difference: torch.Tensor
    """(m,) [nats] The largest difference of any log-probability; for a predicted number, its own, in its unit."""
    kl: torch.Tensor
    """(m,) [nats]; (0,) for a predicted number, which has no probabilities."""
    of_label: torch.Tensor
    """(m or fewer,) [nats] Difference of the label's log-probability, at positions that have one; (0,) for a number."""

    @property
    def size(self) -> torch.Tensor:
        """(m,) The distance by which rows are ranked: KL, or the difference of a predicted number."""
        return self.difference if self.row.unit == "number" else self.kl


@torch.no_grad()
def row_gap(exact: Any, found: Any, row: Row) -> RowGap:
    """exact, found: models of one class with the same outputs, each in its own dtype."""
    outputs = (model(**row.inputs).logits[0] for model in (exact, found))
    ours, theirs = (values.reshape(-1, values.shape[-1]) for values in outputs)  # a whole text has one vector
    if row.unit == "number":
        difference = _finite((ours.double() - theirs.double()).abs()[:, 0])
        return RowGap(row, difference, difference[:0], difference[:0])
    parts: list[torch.Tensor] = []
    for places, labels in zip(row.places.split(_CHUNK), row.labels.split(_CHUNK), strict=True):
        p, q = (torch.log_softmax(logits[places].double(), dim=-1) for logits in (ours, theirs))
        distance = (p - q).abs()
        of_label = distance.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        kl = (p.exp() * (p - q)).sum(dim=-1).clamp(min=0.0)
        parts.append(torch.stack([kl, distance.amax(dim=-1), of_label], dim=1))
    kl, difference, of_label = _finite(torch.cat(parts)).unbind(dim=1)
    return RowGap(row, difference, kl, of_label[row.labels != IGNORED_LABEL])


def _finite(values: torch.Tensor) -> torch.Tensor:
    """The values, with inf in place of those that are not finite."""
    return values.nan_to_num(nan=math.inf, posinf=math.inf)


def summary(gaps: Sequence[RowGap]) -> dict[str, Any]:
    """Mean and largest values over several rows of one unit."""
    unit, difference = gaps[0].row.unit, torch.cat([gap.difference for gap in gaps])
    facts: dict[str, Any] = {"unit": unit, "rows": len(gaps), f"{unit}s": len(difference)}
    if unit == "number":
        return facts | {"difference": float(difference.mean()), "largest difference": float(difference.max())}
    kl, of_label = torch.cat([gap.kl for gap in gaps]), torch.cat([gap.of_label for gap in gaps])
    return facts | {
        "kl": float(kl.mean()),
        "largest kl": float(kl.max()),
        "largest difference": float(difference.max()),
        f"largest difference of the row's {unit}s": float(of_label.max()) if len(of_label) else 0.0,
    }


def figures(facts: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a summary without its row counts: KL and the largest values."""
    return {key: facts[key] for key in ("kl", "largest kl", "difference", "largest difference") if key in facts}


def measure(
    exact: Any, folder: Path, rows: Sequence[Row], *, model_class: str, trust_remote_code: bool
) -> dict[str, Any]:
    """The gap of an exported folder, which computes in its own dtype as `from_pretrained` loads it.

    exact: the masters' model (`of_masters`), FP32. model_class: as in config/task.py. `of rounding alone` is the gap of
    the export's weights computing in FP32; `of the masters rounded` that of the masters rounded to the export's dtypes
    and computing in them, which a sound export has. `modules`: those with the largest error of their own output
    against FP32 (tools/export_hf/outputs.py), on the worst row.
    """
    auto = getattr(transformers, model_class)
    found = in_own_memory(auto.from_pretrained(folder, dtype="auto", trust_remote_code=trust_remote_code)).eval()
    gaps = [row_gap(exact, found, row) for row in rows]
    worst = max(range(len(rows)), key=lambda number: float(gaps[number].size.max()))
    facts = summary(gaps)
    facts["worst"] = {"row": worst}
    if _have_positions(gaps):
        facts["worst"]["position"] = int(rows[worst].places[gaps[worst].size.argmax()])
    facts["by position"] = dict(_by_position(gaps))
    facts["modules"] = _modules(exact, found, rows[worst])
    dtypes = {name: tensor.dtype for name, tensor in _tensors(found)}
    facts["of rounding alone"] = figures(summary([row_gap(exact, found.float(), row) for row in rows]))
    del found
    rounded = copy.deepcopy(exact)
    for name, tensor in _tensors(rounded):
        tensor.data = tensor.data.to(dtypes.get(name, tensor.dtype))
    facts["of the masters rounded"] = figures(summary([row_gap(exact, rounded, row) for row in rows]))
    return facts


def _tensors(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters, shared ones under each name, and buffers: one model may tie what another does not."""
    return chain(model.named_parameters(remove_duplicate=False), model.named_buffers())


def in_own_memory(model: Any) -> Any:
    """The model with its tensors copied: mapped from a file they may be unaligned, which changes the order of sums."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def of_masters(saved: SavedModel, shape: PretrainedConfig, *, model_class: str, trust_remote_code: bool) -> Any:
    """A checkpoint's model with its masters as weights, whole in memory. model_class: as in config/task.py."""
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
    """Raises GapTooLarge if a bound is exceeded or a value is not finite; for single tokens it names a module."""
    number = facts["unit"] == "number"
    mean, what, nats = ("difference", "difference of a number", "") if number else ("kl", "KL", " nats")
    checks = [(what, f"largest {mean}", bounds.difference if number else bounds.kl)]
    checks += [] if number else [("difference of a log-probability", "largest difference", bounds.difference)]
    for what, key, bound in checks:
        if not facts[key] <= (math.inf if bound is None else bound) or math.isinf(facts[key]):
            module = next(iter(facts["modules"]), {"module": "no module", "own error": 0.0})
            allowed = "is not finite" if math.isinf(facts[key]) else f"is above the bound {bound:g}"
            where = ", ".join(f"{name} {number}" for name, number in facts["worst"].items())
            raise GapTooLarge(
                f"the largest {what} between export and masters, {facts[key]:.3g}{nats}, {allowed} (largest "
                f"{checks[0][0]} in {where}); {module['module']} has the largest error of its own, "
                f"{module['own error']:.2%}"
            )
    own, sound = facts[mean], facts["of the masters rounded"][mean]
    if own > bounds.ratio * sound + _NONE:
        raise GapTooLarge(
            f"the mean {checks[0][0]} between export and masters, {own:.3g}{nats}, is above "
            f"{bounds.ratio:g} times that of the masters rounded to the same dtype, {sound:.3g}: more than rounding"
        )


def words_of(facts: Mapping[str, Any], dtype: str) -> list[str]:
    """The gap as lines for the console."""
    unit = facts["unit"]
    seen = f"{facts['rows']} rows" + ("" if unit == "number" else f", {facts[f'{unit}s']} {unit}s")
    line = f"{dtype} against the FP32 masters on {seen}: {figures_in_words(facts)}"
    if unit != "number":
        own = facts[f"largest difference of the row's {unit}s"]
        line += f", of a {unit} of the rows {own:.3g}"
    parts = (("rounding weights alone", "of rounding alone"), ("the masters rounded once", "of the masters rounded"))
    lines = [line, *(f"of {what}: {figures_in_words({'unit': unit, **facts[key]})}" for what, key in parts)]
    positions = ", ".join(f"{where} {gap['kl']:.3g}" for where, gap in facts["by position"].items())
    lines += [f"KL by position: {positions}"] if positions else []
    named = [f"{entry['module']} {entry['own error']:.2%}" for entry in facts["modules"]]
    return [*lines, "largest errors of modules' own outputs: " + ", ".join(named)]


def figures_in_words(facts: Mapping[str, Any]) -> str:
    """KL and the largest values of a summary."""
    largest = facts["largest difference"]
    if facts["unit"] == "number":
        return f"predicted numbers differ by {facts['difference']:.3g} on average, {largest:.3g} at most"
    return (
        f"KL {facts['kl']:.3g} nats a {facts['unit']}, {facts['largest kl']:.3g} at most; largest difference of a "
        f"log-probability {largest:.3g}"
    )


def _have_positions(gaps: Sequence[RowGap]) -> bool:
    """Whether outputs belong to positions in a row rather than to the row as a whole."""
    return any(bool(gap.row.places.any()) for gap in gaps)


def _by_position(gaps: Sequence[RowGap]) -> Iterator[tuple[str, dict[str, float]]]:
    """The gap by ranges of compared positions that double: 0, 1, 2-3, 4-7 and so on."""
    if not _have_positions(gaps):
        return
    kl, difference = torch.cat([gap.kl for gap in gaps]), torch.cat([gap.difference for gap in gaps])
    places = torch.cat([gap.row.places for gap in gaps])
    start, end, last = 0, 1, int(places.max())
    while start <= last:
        inside = (places >= start) & (places < end)
        name = str(start) if min(end - 1, last) == start else f"{start}-{min(end - 1, last)}"
        if inside.any():
            yield name, {"kl": float(kl[inside].mean()), "largest difference": float(difference[inside].max())}
        start, end = end, 2 * end


def _modules(exact: Any, found: Any, row: Row) -> list[dict[str, Any]]:
    with torch.no_grad():
        errors = output_errors(exact, found, lambda: exact(**row.inputs), lambda: found(**row.inputs))
    worst = sorted(errors, key=lambda name: -errors[name][0])[:_MODULES]
    return [{"module": name, "own error": errors[name][0], "output error": errors[name][1]} for name in worst]
