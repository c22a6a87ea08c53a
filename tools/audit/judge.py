"""The audit of a probe's folder: measures each step, and finds the entries of findings.yaml that it meets.

Clipping and the bound on the norm are those of `tools.parity`, and the expected update is torch's AdamW in FP64, as in
its oracle. Nothing of `training.engine` is used: it needs the pinned DeepSpeed, while this must run with any version.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch.optim.adamw import adamw

from config.errors import one_line
from precision.dtypes import DTYPES
from tools.audit.configs import ABSENT, Audit, holds, read_data, verdict_of
from tools.audit.recompute import (
    KNOWN_LOSSES,
    Micros,
    NotRecomputed,
    Oracle,
    Recorded,
    Step,
    are_shifted,
    is_shifting,
    read,
)
from tools.parity.judge_steps import NORM_ROUNDING
from tools.parity.plain import Apart, clip_coefficient

FINDINGS: dict[str, dict[str, Any]] = {entry["id"]: entry for entry in read_data("findings.yaml")}
ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
LOW = {"BF16": torch.bfloat16, "FP16": torch.float16}
_NAMED = {str(dtype): name for name, dtype in LOW.items()}
_SHARED = {"weights": "weights", "gradients": "gradients", "norm": "gradient norm", "scale": "loss scale"}
_SHARED |= {"groups": "optimizer settings", "applied": "skip decisions"}
"""Readable names of the fields that all ranks record alike. gradients: only without ZeRO."""


def audit_folder(folder: Path, source: str | None, reference: str | None) -> Audit:
    """Report on a probe's folder. source, reference: models, as for `Oracle`. Raises UserError for bad input."""
    recorded = read(folder)
    judged, facts = Judge(recorded, source, reference), recorded.facts
    run = {key: facts[key] for key in ("model", "stage", "compute", "world", "accumulation", "optimizer", "versions")}
    run["trainer"] = facts["trainer"].get("class", facts["engine"])
    compared = any(row.keys() & {"gradient_error", "update_error"} for row in judged.measured)
    sound = "nothing wrong was found" if compared else "nothing was compared: no step's gradients, and no update"
    report: dict[str, Any] = {"verdict": verdict_of(judged.findings, sound), "run": run}
    report |= {"folder": str(folder), "findings": judged.findings}
    report |= {"not_checked": judged.unchecked, "steps": judged.measured}
    head = f"{folder}: {run['trainer']}, {run['model']}, ZeRO-{run['stage']}, {run['compute'].upper()}, "
    bits = facts.get("product_bits", 23)
    head += "" if bits == 23 else f"factors of products have {bits} bits (TF32 has 10), "
    head += f"{run['world']} ranks, DeepSpeed {run['versions']['deepspeed']}, steps "
    head += ", ".join(str(step.number) for step in recorded.steps)
    more = {"Not checked": [f"{what}: {why}" for what, why in judged.unchecked.items()]}
    return Audit(report, head, judged.findings, more)


class Judge:
    """Judges the steps of a probe's folder, one after the other."""

    def __init__(self, recorded: Recorded, source: str | None, reference: str | None) -> None:
        """source: the checkpoint that training started from, if given. reference: DPO's reference model."""
        self._recorded, self._run, self._oracle = recorded, recorded.facts, Oracle(recorded, source, reference)
        self._exact = recorded.facts["compute"] == "fp32" and recorded.facts.get("product_bits", 23) == 23
        why = "its files are incomplete, as a crash leaves them"
        self.unchecked = {f"step {number}": why for number in recorded.incomplete}
        """Checks that could not be made, and why."""
        if recorded.ended:
            self.unchecked["later steps"] = recorded.ended
        self.measured: list[dict[str, Any]] = []
        """Figures of each step."""
        self._found: dict[str, dict[str, Any]] = {}
        self._open: dict[str, list[int]] = {}
        """Steps whose gradients were not recomputed, by the reason."""
        self._resumed: float | None = None
        """Updates that the optimizer had counted before the probe started."""
        last: Step | None = None
        for step in recorded.steps:
            self._judge(step, last if last is not None and last.number + 1 == step.number else None)
            last = step
        for why, steps in self._open.items():
            some = f", steps {', '.join(map(str, steps))}" if len(steps) < len(recorded.steps) else ""
            self.unchecked[f"gradients and losses{some}"] = why

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings, the most serious kind first: the entry's fields, the `steps`, and of the worst step the `size` of
        the error as a fraction, what was `measured`, and the `severity` as in known.yaml."""
        return sorted(self._found.values(), key=lambda each: list(FINDINGS).index(each["id"]))

    def _add(self, entry: str, size: float, measured: str = "", *, note: bool = False, **words: Any) -> None:
        """Add a finding, or this step to it. words: for the entry's text, which identifies the finding."""
        says, severity = FINDINGS[entry]["says"].format(**words), "note" if note else "wrong"
        new = {key: value for key, value in FINDINGS[entry].items() if key in ("id", "kind", "instead")}
        new |= {"says": says, "size": -1.0, "severity": "note", "steps": ""}
        known, number = self._found.setdefault(says, new), str(self._step.number)
        if number not in known["steps"].split(", "):
            known["steps"] += f", {number}" if known["steps"] else number
        if not (severity, abs(size)) <= (known["severity"], known["size"]):  # also true for nan
            known |= {"size": abs(size), "measured": measured or f"{abs(size):.2g}", "severity": severity}

    def _find(self) -> None:
        """Add the entries whose conditions the step's figures meet, as findings or as unchecked."""
        figures = self._run | {name: value for name, value in self._row.items() if value is not None}
        for name, entry in FINDINGS.items():
            conditions = entry.get("when", {}).items()
            if not conditions or not all(holds(wanted, figures.get(key, ABSENT)) for key, wanted in conditions):
                continue
            if "unchecked" in entry:
                self.unchecked[entry["unchecked"]] = entry["says"].format(**figures)
                continue
            size, measured = figures.get(entry.get("size", ""), 1.0), entry.get("measured", "")
            if "compare" in entry:
                found, expected = (figures.get(key, key) for key in entry["compare"])
                size, measured = found / expected - 1, measured or f"{found:.6g} for {expected:.6g}"
                if abs(size) <= figures.get(entry["within"], entry["within"]):
                    continue
            note = "note" in entry and size <= figures[entry["note"]]
            self._add(name, size, measured.format(**figures), note=note, **figures)

    def _judge(self, step: Step, last: Step | None) -> None:
        """last: the previous step, if it was recorded."""
        self._step, self._facts, self._scale, self._stride = step, step.facts, step.facts["scale"], step.facts["stride"]
        self._row = {"step": step.number, "applied": self._facts["applied"], "scale": self._scale}
        self.measured.append(self._row)
        self._before, self._after = step.named("before"), step.named("after")
        self._groups = {name: step.facts["groups"][place] for name, (*_, place) in self._run["parameters"].items()}
        self._gradient = {name: _flat(value) / self._scale for name, value in step.named("gradient").items()}
        if self._resumed is None:
            made = any(bool(value.any()) for value in step.named("exp_avg_sq_before").values())
            counted = (self._facts["optimizer_step"] or 0) - self._facts["applied"] - self._facts["applied_before"]
            self._resumed = counted if made else 0
        self._done = self._facts["applied_before"] + self._resumed
        self._dtypes()
        self._batches(last)
        stale = self._ranks()
        self._row["gradients"] = len(self._gradient)
        if self._gradient and all(bool(value.isfinite().all()) for value in self._gradient.values()):
            try:
                if stale:
                    raise NotRecomputed("they were computed with other weights than the recorded")
                micros = self._oracle.recompute(step)
                self._reduced(micros, self._loss(micros))
            except (NotRecomputed, RuntimeError) as error:  # the latter: out of memory, or of what torch does not do
                self._open.setdefault(one_line(error), []).append(step.number)
            self._norm_and_update()
        elif self._gradient:
            self.unchecked[f"step {step.number}"] = "its gradients are not finite"
            self._moved("not-finite-applied" if self._facts["applied"] else "moved-in-skipped", step)
        self._schedule()
        self._find()
        if last is not None:
            self._moved("moved-between", last)

    def _moved(self, entry: str, step: Step) -> None:
        """Add an entry if masters changed after the end of a step; NaN that stays is no change between steps."""
        after, stride, lasting = step.named("after"), step.facts["stride"], step is not self._step
        equal = partial(torch.allclose, rtol=0.0, atol=0.0, equal_nan=lasting)
        both = math.lcm(stride, self._facts["start_stride"])
        kept = {name: _flat(value)[:: both // stride] for name, value in after.items()}
        names = [name for name, value in kept.items() if not equal(value, self._start(name, both))]
        if names:
            self._add(entry, len(names) / len(after), _names(names))

    def _start(self, name: str, stride: int) -> torch.Tensor:
        return _flat(self._before[name])[:: stride // self._facts["start_stride"]]

    def _dtypes(self) -> None:
        micros, stored = self._step.micros.values(), self._oracle.stored
        given = self._facts["fp32"], [micro["loss_dtype"] for micro in micros]
        stepped, losses = (next((_NAMED[dtype] for dtype in dtypes if dtype in _NAMED), "") for dtypes in given)
        ends = ((self._start(name, self._stride), value.flatten()) for name, value in self._after.items())
        moved = (end[end != start] for start, end in ends)  # nothing at a warm-up's rate of 0
        self._row.update(stepped=stepped, masters=_held(moved), loss_dtype=losses)
        calls = [call for micro in micros for call in micro["calls"]]
        self._row["evaluates"] = self._run["dropout"] and not all(call.get("training", True) for call in calls)
        if not any(call["autocast"] for call in calls):
            low = [f"{name} {_NAMED[dtype]}" for name, dtype in self._facts["inner"].items() if dtype in _NAMED]
            self._row.update(low_modules=len(low) if self._facts["inner"] else None, modules=", ".join(low))
        if not self._done:
            self._row["start"] = _held(self._before.values())
            if stored:
                every = slice(None, None, self._facts["start_stride"])
                pairs = ((own.reshape(-1), stored[name].reshape(-1)[every]) for name, own in self._before.items())
                self._row["start_error"] = Apart(pairs).error

    def _batches(self, last: Step | None) -> None:
        seen: dict[bytes, tuple[int, str]] = {}
        kind = self._run["trainer"].get("loss")
        for step in (self._step,) if last is None else (last, self._step):
            for (rank, number), micro in step.micros.items():
                given = micro["batch"] | micro["calls"][0]["inputs"] if micro["calls"] else {}
                if "input_ids" not in given:
                    continue
                ids, here = given["input_ids"], f"rank {rank}, micro-batch {number + 1} of step {step.number}"
                other, where = seen.setdefault(_digest(given), (rank, here))
                if step is not self._step:
                    continue
                if where != here and kind not in KNOWN_LOSSES:  # GRPO learns from the same answers in several steps
                    self.unchecked["batches trained on again"] = f"{kind} may mean to"
                elif where != here:
                    self._add("batch-again" if other == rank else "ranks-share-a-batch", 1.0, f"{here}, as {where}")
                labels, mask = (given.get(key, ids[:0]) for key in ("labels", "attention_mask"))
                if are_shifted(given) and is_shifting(micro["calls"][0], self._run["trainer"]):
                    self._add("labels-shifted-twice", 1.0, here)
                if labels.shape == mask.shape == ids.shape and (learned := int(((labels >= 0) & (mask == 0)).sum())):
                    self._add("padding-learned", learned / len(ids.flatten()), f"{learned} labels of {here}")

    def _ranks(self) -> bool:
        """Compare ranks, and weights with masters; returns whether the latter differ."""
        for rank in self._step.ranks[1:]:
            for key, what in _SHARED.items():
                own, other = self._facts[key], rank[key]
                if repr(own) != repr(other):  # NaN is not NaN
                    named = own if isinstance(own, dict) else {}
                    names = [name for name, value in named.items() if repr(value) != repr(other.get(name))]
                    told = _names(names) if names else f"{other} and {own}"[:120]
                    size = len(names) / len(own) if names else 1.0
                    self._add("ranks-differ", size, told, rank=rank["rank"], what=what)
        stale: list[str] = []
        if self._facts["weights"] and self._facts["start_stride"] > 1:
            self.unchecked["weights against masters"] = "the probe kept a part of the masters"
            return False
        for name in (name for name in self._facts["weights"] if name in self._before):
            held = self._before[name].to(DTYPES[self._run["compute"]]).double()
            sums = torch.stack([held.sum(), held.square().sum()])
            off = (torch.tensor(self._facts["weights"][name], dtype=torch.float64) - sums).abs().max()
            if off > 1e-9 * (held.abs().sum() + sums[1]):
                stale.append(name)
        if stale:
            self._add("stale-weights", len(stale) / len(self._before), _names(stale))
        return bool(stale)

    def _loss(self, micros: Micros) -> torch.Tensor:
        """Judge which loss was trained; returns the weights that it gives to the micro-batches' gradients."""
        counts, total = micros.counts, float(micros.counts.sum())
        mean, weights = float(micros.exact_loss.sum()) / total, micros.reported / micros.plain_loss
        least = 1e-4 if self._exact else 2e-3
        bound = 3 * float((micros.plain_loss / micros.exact_loss - 1).abs().max()) + least
        times, right = weights * total, torch.full_like(weights, 1 / total)
        off = Apart((weights @ rows, right @ rows) for rows in micros.exact.values()).error
        said = self._recorded.reported.get(self._step.number)
        differ, means = _spread(times) / (2 * bound), _spread(weights * counts) / (2 * bound)
        kind = self._run["trainer"].get("loss")
        if kind not in KNOWN_LOSSES and (means > 1 if differ > 1 else abs(float(times.mean()) - 1) > bound):
            raise NotRecomputed(f"{kind} makes another loss than the labels'")
        self._row.update(trained_loss=float(micros.reported.sum()), mean_loss=mean, reported_loss=said)
        self._row.update(least=float(times.min()), most=float(times.max()), times=float(times.mean()), loss_cost=off)
        self._row.update(labels_differ=differ, means_differ=means)
        self._row.update(loss_bound=bound, report_bound=bound + 1e-4 / mean)
        self._row["router_times"] = micros.router_times or None
        return weights

    def _reduced(self, micros: Micros, weights: torch.Tensor) -> None:
        """Judge whether the reduced gradient is that of the loss that was trained."""
        tolerance, least = (1e-3, 2e-5) if self._exact else (0.02, 2e-3)
        fitted = micros.fit(self._gradient, weights, tolerance)
        shares, noise = fitted.overall, fitted.noise
        self._row.update(gradient_error=fitted.error, dtype_error=noise, shares=shares.tolist())
        rounding, dtype = 0.0, _held(self._gradient.values(), self._scale)
        if dtype and len(weights) > 1:
            rounding = micros.rounded_sum(weights, LOW[dtype])
            self._row.update(sums_dtype=dtype, sums_cost=rounding)
        self._row["gradient_of"] = fitted.error / (2 * (noise + rounding) + least)
        if self._row["gradient_of"] > 1:
            return
        listed = f"{', '.join(f'{share:.3g}' for share in shares.tolist())} of the micro-batches' gradients"
        if self._scale != 1.0 and bool(((shares * self._scale - 1).abs() < 0.05).all()):
            self._add("unscaled-alone", 1 - 1 / self._scale, listed)
        else:
            for what, size in _told(micros.places, shares, tolerance).items():
                self._add("shares", size, listed, shares=what)
        others: dict[str, dict[str, float]] = {}
        for name, own in fitted.deviating.items():
            for what, size in _told(micros.places, own, tolerance).items():
                others.setdefault(what, {})[name] = size
        for what, sizes in others.items():
            told = f"{_names(list(sizes))} of {fitted.judged}"
            self._add("shares-in-some", max(map(abs, sizes.values())), told, shares=what)

    def _norm_and_update(self) -> None:
        facts, norm = self._facts, math.sqrt(sum(self._facts["squares"].values())) / self._scale
        rule, moments = self._run["optimizer"] in ADAMW, "exp_avg_after" in facts
        self._row.update(reported_norm=facts["norm"] or None, gradient_norm=norm, norm_bound=NORM_ROUNDING)
        self._row.update(rule=rule, moments=moments)
        if not facts["applied"]:
            self._moved("moved-in-skipped", self._step)
        elif rule and moments and norm:
            self._update(self._factor(norm, self._run["clipping"]))

    def _factor(self, norm: float, clipping: float) -> float:
        """Factor on the gradient before it reached the optimizer, inferred from its first moment."""
        start, end, pairs = self._step.named("exp_avg_before"), self._step.named("exp_avg_after"), []
        for name, value in self._gradient.items():
            beta = self._groups[name]["betas"][0]
            pairs.append((_flat(end[name]) - beta * _flat(start.get(name, torch.zeros(1))), (1 - beta) * value))
        factor, expected = Apart(pairs).factor, clip_coefficient(norm, clipping)
        self._row.update(factor=factor, factor_by_rule=expected, implied_norm=clipping / factor if factor else math.inf)
        self._row["clips_less"] = clipping > 0 and expected < factor < 1.001
        if self._scale != 1.0:
            self._row["scaled_off"] = abs(factor / clip_coefficient(norm * self._scale, clipping) - 1)
        return factor

    def _update(self, factor: float) -> None:
        """Compare masters and second moments with torch's AdamW in FP64, from the moments that the optimizer had."""
        done, count = self._done + 1, self._facts["optimizer_step"]
        self._row.update(updates=done, counted=count)
        moved, second, slack, still, every = Apart(), Apart(), 0.0, 0, 0
        first, squares, ends = (self._step.named(f"exp_avg_{when}") for when in ("before", "sq_before", "sq_after"))
        usual = {"foreach": False, "amsgrad": False, "maximize": False}
        for name, value in self._after.items():
            start, group = self._start(name, self._stride), self._groups[name]
            master, zeros = start.clone(), torch.zeros_like(start)
            gradient, mean, square = (_flat(each.get(name, zeros)) for each in (self._gradient, first, squares))
            beta1, beta2 = group["betas"]
            settings = {key: group[key] for key in ("lr", "eps", "weight_decay")} | usual
            step = torch.tensor((count or done) - 1.0)
            adamw([master], [factor * gradient], [mean], [square], [], [step], beta1=beta1, beta2=beta2, **settings)
            change, way = _flat(value) - start, master - start
            moved.add(change, way)
            second.add(_flat(ends[name]), square)
            slack += float((start * 2.0**-24).square().sum())
            due = master.float().double() != start  # a warm-up's first updates may be below half an ulp of FP32
            still, every = still + int(((change == 0) & due).sum()), every + int(due.sum())
        if not moved.size:
            return
        ratio, error, around = moved.factor, moved.error, 2e-3 + 6 * math.sqrt(slack / moved.size)
        rates, stands = [group["lr"] for group in self._facts["groups"]], error > 0.01 or still > 0.5 * every
        self._row.update(lr=rates, rate=rates[0], moved_at=ratio * rates[0], rate_ratio=ratio, update_error=error)
        lost = still / every if every and stands else 0.0
        self._row.update(second_error=second.error, still=lost, update_of=error / around)
        self._row["rate_of"] = abs(error - abs(ratio - 1)) / (0.1 * error + around)

    def _schedule(self) -> None:
        at, done = self._facts["schedule"], self._done
        facts = [step.facts for step in self._recorded.steps]
        pairs = [(own, then) for own, then in pairwise(facts) if own["applied"] and own["step"] + 1 == then["step"]]
        self._row.update(schedule=at, done=done)
        if at is not None:
            per_process, where = at == done * self._run["world"], "ahead of" if at > done else "behind"
            self._row.update(ahead=(at - done) / max(1.0, done), where=where, per_process=per_process)
            self._row["stands"] = bool(pairs) and all(own["schedule"] == then["schedule"] for own, then in pairs)


def _told(places: list[tuple[int, int]], shares: torch.Tensor, tolerance: float) -> dict[str, float]:
    """Human-readable meaning of shares other than 1, for the largest groups with equal shares, and their errors."""
    groups = [("the reduced gradient is", list(range(len(places))))]
    for rank in dict.fromkeys(rank for rank, _ in places):
        groups.append((f"rank {rank}'s gradients are", [at for at, (own, _) in enumerate(places) if own == rank]))
    groups += [(f"the gradient of micro-batch {number + 1} is", [at]) for at, (_, number) in enumerate(places)]
    found, left = dict[str, float](), {at for at, off in enumerate((shares - 1).abs() > tolerance) if off}
    for what, members in groups:
        own, share = shares[members], float(shares[members].mean())
        if left.issuperset(members) and float(own.max() - own.min()) <= 8 * tolerance * max(1.0, abs(share)):
            word = "lost" if abs(share) < 0.1 else "too small" if share < 1 else "too large"
            found[f"{what} {'doubled' if abs(share - 2) < 0.1 else word}"] = share - 1
            left -= set(members)
    return found


def _digest(given: dict[str, torch.Tensor]) -> bytes:
    """Digest of all that a micro-batch holds, but for the Trainer's count of the labels of the whole step."""
    found = sha256()
    for name in sorted(given.keys() - {"num_items_in_batch"}):
        found.update(name.encode() + given[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.digest()


def _spread(values: torch.Tensor) -> float:
    return float(values.max() / values.min()) - 1


def _held(values: Iterable[torch.Tensor], scale: float = 1.0) -> str:
    """The 16-bit format that holds over 99.9% of the non-zero values at the scale of their rounding; empty if none."""
    whole = torch.cat([(each * scale).float().flatten() for each in values])
    whole = whole[whole != 0]
    held = {name: (whole == whole.to(dtype).float()).sum() for name, dtype in LOW.items()}
    return next((name for name, count in held.items() if count > 0.999 * len(whole)), "")


def _flat(values: torch.Tensor) -> torch.Tensor:
    """A copy in FP64, one-dimensional."""
    return values.reshape(-1).to(torch.float64, copy=True)


def _names(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) > 1)}, such as {names[0]}"
