"""Judges recorded steps: what is wrong with them, in order of severity.

Distances, clipping and rounding are those of `tools.parity.plain`, and an update is torch's AdamW in FP64, as in the
oracle of `tools.parity`. The judges there compare an engine, or the events of a run, with a reference that is built
from the run config; another trainer's step is tensors alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision.dtypes import DTYPES
from precision.tolerance import relative, unit_roundoff
from tools.audit.gradients import Fit, Micros, NotRecomputed, Objective, fit, recompute, rounded_sum
from tools.audit.recorded import Recorded, Step
from tools.parity.plain import Apart, clip_coefficient

SEVERITY = ("masters", "loss", "gradients", "reduction", "clipping", "ranks", "updates", "dtypes", "learning rate")
"""Kinds of findings, the gravest first."""
ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_NARROW = ("torch.bfloat16", "torch.float16")
_SHARED = {"norm": "gradient norm", "scale": "loss scale", "groups": "optimizer settings", "applied": "skip decision"}
FP32_SUMS = "data_types.grad_accum_dtype and communication_data_type fp32, at ZeRO-1 or above"
LOW = {"BF16": torch.bfloat16, "FP16": torch.float16}


@dataclass
class Judged:
    """Findings, what could not be checked and why, and the figures of each step.

    A finding has its `kind`, `what` is wrong (the same words in every step), the `steps`, and of the step where it is
    worst the `size` of the error as a share, a `detail`, the `severity` as in known.yaml, and what to do `instead`.
    """

    unchecked: dict[str, str] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)
    _found: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def findings(self) -> list[dict[str, Any]]:
        """The gravest kind first."""
        return sorted(self._found.values(), key=lambda each: SEVERITY.index(each["kind"]))

    def add(self, step: int, what: str, size: float, **told: Any) -> None:
        """Add a finding, or a step to one; `what` tells findings apart."""
        known = self._found.setdefault(what, {"what": what, "size": -1.0, "severity": "note", "steps": []})
        known["steps"] = sorted({*known["steps"], step})
        if not (told["severity"] == "wrong", size) <= (known["severity"] == "wrong", known["size"]):  # also of nan
            known |= {"size": size, **told}


def judge(
    recorded: Recorded, model: Any, objective: Objective | None, stored: Mapping[str, torch.Tensor] | None
) -> Judged:
    """objective: None where gradients cannot be recomputed. stored: the checkpoint's weights, where it is given."""
    found = Judged()
    for number in recorded.incomplete:
        found.unchecked[f"step {number}"] = "its files are incomplete, as a crash leaves them"
    last: _StepJudge | None = None
    for number in recorded.numbers:
        last = _StepJudge(found, recorded, recorded.step(number), last)
        last.judge(model, objective, stored)
    return found


class _StepJudge:
    """The checks of one step. last: those of the recorded step before."""

    def __init__(self, found: Judged, recorded: Recorded, step: Step, last: _StepJudge | None) -> None:
        self.found, self.run, self.step, self.facts = found, recorded.facts, step, step.facts
        self.recorded, self.scale, self.stride = recorded, step.facts["scale"], step.facts["stride"]
        self.before, self.after = step.named("before"), step.named("after")
        self.gradient = {name: _flat(value) / self.scale for name, value in step.named("gradient").items()}
        self.last = last if last is not None and last.step.number + 1 == step.number else None
        self.row: dict[str, Any] = {"step": step.number, "applied": self.facts["applied"]}
        found.measured.append(self.row)
        # a resumed optimizer has counted before the probe came
        made = any(bool(value.any()) for value in step.named("exp_avg_sq/before").values())
        counted = (self.facts["optimizer_step"] or 0.0) - self.facts["applied_before"] if made else 0.0
        self.resumed: float = last.resumed if last is not None else counted
        self.done = self.facts["applied_before"] + self.resumed

    def add(
        self, kind: str, what: str, size: float, detail: str = "", *, note: bool = False, instead: str = ""
    ) -> None:
        told = {"kind": kind, "detail": detail, "severity": "note" if note else "wrong", "instead": instead}
        self.found.add(self.step.number, what, abs(size), **told)

    def judge(self, model: Any, objective: Objective | None, stored: Mapping[str, torch.Tensor] | None) -> None:
        self._masters(stored)
        stale = self._ranks()
        self._batches()
        self._dtypes()
        if not self.gradient:
            self.found.unchecked["gradients"] = "DeepSpeed hands out no reduced gradient here"
        elif all(bool(value.isfinite().all()) for value in self.gradient.values()):
            try:
                if stale:
                    raise NotRecomputed("they were computed with other weights than the recorded")
                if objective is not None:
                    self._gradients(recompute(model, self.recorded, self.step, objective))
            except NotRecomputed as error:
                self.found.unchecked["gradients and losses"] = str(error)
            self._norm_and_update()
        self._schedule()
        if self.last is not None:
            self._moved("masters change between two steps", self.last.after, self.last.stride)

    def _moved(self, what: str, masters: Mapping[str, torch.Tensor], stride: int) -> None:
        names = [name for name, value in masters.items() if not torch.equal(_flat(value), self._start(name, stride))]
        if names:
            self.add("updates", what, len(names) / len(masters), _names(names))

    def _start(self, name: str, stride: int) -> torch.Tensor:
        return _flat(self.before[name])[::stride]

    def _masters(self, stored: Mapping[str, torch.Tensor] | None) -> None:
        low = [dtype for dtype in self.facts["fp32"] if dtype not in ("torch.float32", "torch.float64")]
        if low:
            self.add("masters", f"the optimizer steps {', '.join(low)} numbers: there are no FP32 masters", 1.0)
        elif self.facts["applied"] and (name := _held(self.after.values())):
            self.add("masters", f"masters are FP32 tensors of {name} numbers after an update", 1.0)
        rounded, unsure = "" if self.done else _held(self.before.values()), "whether masters start rounded"
        if stored is None and rounded and self.run["compute"] != "fp32":
            self.found.unchecked[unsure] = f"they start as {rounded} numbers; give --model, where the run began"
        if stored is None or self.done:
            return
        apart = Apart((value, stored[name]) for name, value in self.before.items()).error
        what = "masters do not start as the checkpoint's weights"
        if apart > 0.01:
            self.found.unchecked[unsure] = f"the weights of --model are {apart:.0%} from those that the run began with"
        elif apart > 1e-6:
            rounded = f"masters start as {rounded} numbers where the checkpoint has more digits" if rounded else what
            self.add("masters", rounded, apart, f"{apart:.1e} of the weights")

    def _ranks(self) -> bool:
        """Compare ranks, and weights with masters; whether the latter differ."""
        for rank in self.step.ranks[1:]:
            where = f"rank {rank['rank']}"
            for what in ("weights", "gradients") if self.run["stage"] == 0 else ("weights",):
                mine, other = self.facts["sums"][what], rank["sums"][what]
                names = [name for name in mine if mine[name] != other.get(name)]
                if names:
                    off = max(relative(abs(other[name][1] - mine[name][1]), mine[name][1]) for name in names)
                    self.add("ranks", f"{where} has other {what} than rank 0", off, _names(names))
            for key, what in _SHARED.items():
                if self.facts[key] != rank[key]:
                    told = f"{rank[key]} and {self.facts[key]}"
                    self.add("ranks", f"{where} has another {what} than rank 0", 1.0, told[:120])
        stale = []
        for name, sums in self.facts["sums"]["weights"].items():
            if name in self.before:
                held = self.before[name].to(DTYPES[self.run["compute"]]).double()
                slack = 1e-9 * float(held.abs().sum() + held.square().sum())
                if max(abs(sums[0] - float(held.sum())), abs(sums[1] - float(held.square().sum()))) > slack:
                    stale.append(name)
        if stale:
            what = "the model computes with other weights than its rounded masters"
            self.add("ranks", what, len(stale) / len(self.before), _names(stale))
        return bool(stale)

    def _batches(self) -> None:
        seen: dict[bytes, tuple[int, str]] = {}
        for each in (self.last.step, self.step) if self.last is not None else (self.step,):
            for rank, number in each.places:
                given: dict[str, torch.Tensor] = {}
                for part in reversed(each.inputs(rank, number)):
                    given |= part
                if "input_ids" not in given:
                    continue
                ids, here = given["input_ids"], f"rank {rank}, micro-batch {number + 1} of step {each.number}"
                key = ids.numpy().tobytes()
                if key in seen and each is self.step:
                    again = seen[key][0] == rank
                    what = "a batch is trained on again" if again else "ranks train on the same batch"
                    self.add("loss", what, 1.0, f"{here} has the tokens of {seen[key][1]}")
                seen[key] = rank, here
                if each is self.step and given.get("labels", ids[:0]).shape == ids.shape:
                    self._labels(ids, given["labels"], here)

    def _labels(self, ids: torch.Tensor, labels: torch.Tensor, here: str) -> None:
        counted = labels >= 0
        own = float((labels == ids)[counted].float().mean())
        ahead = float((labels[..., :-1] == ids[..., 1:])[counted[..., :-1]].float().mean())
        if own < 0.9 < ahead:
            what = "labels are shifted before the model shifts them: it learns the token after the next"
            self.add("loss", what, 1.0, here)

    def _dtypes(self) -> None:
        for dtype in {micro["loss_dtype"] for rank in self.step.ranks for micro in rank["micros"]}:
            if dtype in _NARROW:
                self.add("dtypes", f"the loss is {dtype}", unit_roundoff(getattr(torch, dtype.removeprefix("torch."))))
        low = [f"{name} {dtype}" for name, dtype in self.facts["inner"].items() if dtype in _NARROW]
        cast = any(call["autocast"] for micro in self.facts["micros"] for call in micro["calls"])
        if low and self.run["compute"] == "fp32" and not cast:
            self.add("dtypes", "modules of an FP32 run return 16 bits", 1.0, ", ".join(low))

    def _gradients(self, micros: Micros) -> None:
        """Which loss was trained, and whether the reduced gradient is its."""
        low, counts, total = self.run["compute"] != "fp32", micros.counts, float(micros.counts.sum())
        mean, weights = float(micros.exact_loss.sum()) / total, micros.reported / micros.plain_loss
        bound = 3 * float((micros.plain_loss / micros.exact_loss - 1).abs().max()) + (2e-3 if low else 1e-4)
        ratio, own = weights * total, weights * counts
        self.row |= {"loss": float(micros.reported.sum()), "exact_loss": mean}
        if _spread(ratio) > 2 * bound:
            what = "the loss is a mean of the micro-batches' means, not of all that counts"
            if _spread(own) > 2 * bound:
                what = "the loss that is trained is not that of the recorded labels"
            right = torch.full_like(weights, 1 / total)
            off = Apart((weights @ rows, right @ rows) for rows in micros.exact.values()).error
            told = f"labels count {float(ratio.min()):.2f} to {float(ratio.max()):.2f} times"
            self.add("loss", what, off, f"{told}; the gradient is {off:.1%} off")
        elif abs(float(ratio.mean()) - 1) > bound:
            what = "the loss that is trained is a multiple of the mean over all that counts"
            self.add("loss", what, float(ratio.mean()) - 1, f"{float(ratio.mean()):.4g} times")
        said = self.recorded.reported.get(self.step.number)
        if said is not None and abs(said / mean - 1) > bound + 1e-4 / mean:
            what = "the loss that is reported is not the mean over all that counts"
            self.add("loss", what, said / mean - 1, f"{said:.6g} for {mean:.6g}")
        tolerance = 0.02 if low else 1e-3
        fitted = fit(self.gradient, micros, weights, tolerance)
        self.row |= {"reported": said, "gradient_error": fitted.error, "noise": fitted.noise}
        self.row["shares"] = fitted.overall.tolist()
        rounding, name = 0.0, _held(self.gradient.values(), self.scale)
        if name and len(weights) > 1:
            rounding = rounded_sum(micros, weights, LOW[name])
            told = f"rounding the sums costs {rounding:.1e} of the gradient, computing in {name} {fitted.noise:.1e}"
            note = rounding <= fitted.noise
            self.add("reduction", f"gradients are summed in {name}", rounding, told, note=note, instead=FP32_SUMS)
        if fitted.error > 2 * (fitted.noise + rounding) + (2e-3 if low else 2e-5):
            told = f"{fitted.error:.1e} of it, where the dtype explains {fitted.noise:.1e}"
            what = "the reduced gradient is not what plain torch makes of the micro-batches"
            self.add("gradients", what, fitted.error, told)
        else:
            self._shares(micros.places, fitted, tolerance)

    def _shares(self, places: list[tuple[int, int]], fitted: Fit, tolerance: float) -> None:
        told = _told(places, fitted.overall, tolerance)
        if self.scale != 1.0 and bool(((fitted.overall * self.scale - 1).abs() < 0.05).all()):
            told = {"the gradient is divided by a loss scale that the loss was not multiplied by": 1 - 1 / self.scale}
        listed = ", ".join(f"{share:.3g}" for share in fitted.overall.tolist())
        for what, size in told.items():
            self.add("gradients", what, size, f"{listed} of the micro-batches' gradients")
        groups: dict[str, list[str]] = {}
        for name, shares in fitted.deviating.items():
            for what in _told(places, shares, tolerance):
                groups.setdefault(what, []).append(name)
        for what, names in groups.items():
            size = max(float((fitted.deviating[name] - 1).abs().max()) for name in names)
            self.add("gradients", f"{what}, in some parameters", size, f"{_names(names)} of {fitted.judged}")

    def _norm_and_update(self) -> None:
        facts, unsure = self.facts, "clipping and updates"
        norm = math.sqrt(sum(facts["sums"]["squares"].values())) / self.scale
        self.row |= {"norm": facts["norm"], "exact_norm": norm, "scale": self.scale}
        if not facts["norm"]:
            self.found.unchecked["the reported norm"] = "the engine reports none"
        elif facts["applied"] and abs(facts["norm"] / norm - 1) > 1e-3:
            told = f"{facts['norm']:.6g} for {norm:.6g}"
            self.add("clipping", "the reported norm is not the gradient's", facts["norm"] / norm - 1, told)
        if not facts["applied"]:
            self._moved("masters move in a step that was skipped", self.after, self.stride)
        elif self.run["optimizer"] not in ADAMW:
            self.found.unchecked[unsure] = f"the rule of {self.run['optimizer']} is not known here"
        elif not facts["moments_after"]:
            self.found.unchecked[unsure] = "the optimizer's moments cannot be read"
        elif self.gradient and norm:
            self._update(self._factor(norm, self.run["clipping"]))

    def _group(self, name: str) -> dict[str, Any]:
        group: dict[str, Any] = self.facts["groups"][self.run["parameters"][name][3] or 0]
        return group

    def _factor(self, norm: float, clipping: float) -> float:
        """Factor on the gradient before it came to the optimizer, read from its first moment."""
        start, end, pairs = self.step.named("exp_avg/before"), self.step.named("exp_avg/after"), []
        for name, value in self.gradient.items():
            beta = self._group(name)["betas"][0]
            pairs.append((_flat(end[name]) - beta * _flat(start.get(name, torch.zeros(1))), (1 - beta) * value))
        factor, expected = Apart(pairs).factor, clip_coefficient(norm, clipping)
        self.row |= {"factor": factor, "expected_factor": expected}
        scaled = clip_coefficient(norm * self.scale, clipping)
        apart = Apart((factor * way, added) for added, way in pairs).error
        if abs(factor / expected - 1) <= 2e-3:
            what = "parameters' gradients are multiplied by different factors" if 0.02 < apart < math.inf else ""
        elif self.scale != 1.0 and abs(factor / scaled - 1) < 2e-2:
            what = "gradients are clipped by the norm of the scaled gradient"
        elif any(abs(factor * scale / expected - 1) < 2e-3 for scale in (self.scale, 1 / self.scale)):
            what = "gradients are unscaled once too often, or not at all"
        elif clipping and expected < factor < 1.001:
            what = "gradients are clipped by the norm of a part of them"
        else:
            what = "gradients are multiplied by another factor than clipping's"
        implied = f", as of a norm of {clipping / factor:.4g} where it is {norm:.4g}" if clipping and factor else ""
        size = apart if what.startswith("parameters") else factor / expected - 1
        if what:
            self.add("clipping", what, size, f"times {factor:.4g} for {expected:.4g}{implied}")
        return factor

    def _update(self, factor: float) -> None:
        """The masters and second moments against torch's AdamW in FP64 on the moments that the optimizer had."""
        done, count = self.done + 1, self.facts["optimizer_step_after"]
        if count is not None and count != done:
            what = "the optimizer has counted other updates than were made"
            self.add("updates", what, count / done - 1, f"{count:.0f} for {done:.0f}")
        moved, second, slack, still, every = Apart(), Apart(), 0.0, 0, 0
        squares = self.step.named("exp_avg_sq/after")
        before = [self.step.named(f"{key}/before") for key in ("exp_avg", "exp_avg_sq")]
        for name, value in self.after.items():
            start = self._start(name, self.stride)
            zeros = torch.zeros_like(start)
            moments = [_flat(each.get(name, zeros)).clone() for each in before]
            gradient = factor * self.gradient.get(name, zeros)
            master, square = _by_adamw(start, gradient, moments, self._group(name), count or done)
            change, way = _flat(value) - start, master - start
            moved.add(change, way)
            second.add(_flat(squares[name]), square)
            slack += float((start * 2.0**-24).square().sum())
            still, every = still + int(((change == 0) & (way != 0)).sum()), every + int((way != 0).sum())
        if not moved.size:
            return
        ratio, error, around = moved.factor, moved.error, 2e-3 + 6 * math.sqrt(slack / moved.size)
        rate = self.facts["groups"][0]["lr"]
        self.row |= {"lr": [group["lr"] for group in self.facts["groups"]], "lr_ratio": ratio, "update_error": error}
        if second.error > 5e-4:
            self.add("updates", "the second moment is not that of the gradient", second.error)
        if still > 0.05 * every and error > 0.01 or still > 0.5 * every:
            what = "updates are lost to rounding" if still < every else "the update is lost"
            told = f"{still / every:.1%} of the values stand still; {error:.1%} of the update is missing"
            self.add("updates", what, error, told)
        elif error > around and abs(error - abs(ratio - 1)) < 0.1 * error + around:
            what = "masters move by another learning rate than the optimizer's"
            self.add("learning rate", what, ratio - 1, f"{ratio * rate:.4g} for {rate:.4g}")
        elif error > around and second.error <= 5e-4:
            self.add("updates", "masters do not move as AdamW in FP64 moves them", error, f"{error:.1e} of the update")

    def _schedule(self) -> None:
        at, what = self.facts["schedule"], "the step of the learning rate"
        if at is None:
            self.found.unchecked[what] = "the probe knows no scheduler that counts; give it `scheduler=`"
        elif at != self.done and at == self.done * self.run["world"]:
            why = "the schedule is stepped once for each process, as Accelerate does: it has to be so much longer"
            self.found.unchecked[what] = why
        elif at != self.done:
            what = f"the schedule is {'ahead of' if at > self.done else 'behind'} the updates"
            told = f"at {at:.0f} after {self.done:.0f} updates"
            self.add("learning rate", what, (at - self.done) / max(1.0, self.done), told)


def _by_adamw(
    start: torch.Tensor, gradient: torch.Tensor, moments: list[torch.Tensor], group: Mapping[str, Any], count: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Master and second moment after the update of that number. All tensors FP64; moments change in place."""
    parameter = torch.nn.Parameter(start.clone())
    parameter.grad = gradient
    settings = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
    optimizer = torch.optim.AdamW([parameter], **settings, foreach=False)
    state = {"step": torch.tensor(count - 1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1]}
    optimizer.state[parameter] = state
    optimizer.step()
    return parameter.detach(), moments[1]


def _told(places: list[tuple[int, int]], shares: torch.Tensor, tolerance: float) -> dict[str, float]:
    """Meaning of shares other than 1, with how far off they are."""
    off = (shares - 1).abs() > tolerance
    if not bool(off.any()):
        return {}
    if float(shares.max() - shares.min()) <= 4 * tolerance * max(1.0, float(shares.abs().max())):
        return dict([_meant("the reduced gradient is", shares)])
    found = dict[str, float]()
    for rank in {rank: None for rank, _ in places}:
        mine = [at for at, (own, _) in enumerate(places) if own == rank]
        if bool(off[mine].all()) and float(shares[mine].max() - shares[mine].min()) <= 8 * tolerance:
            found |= [_meant(f"rank {rank}'s gradients are", shares[mine])]
        else:
            named = {at: f"the gradient of micro-batch {places[at][1] + 1} is" for at in mine if off[at]}
            found |= [_meant(what, shares[at]) for at, what in named.items()]
    return found


def _meant(what: str, shares: torch.Tensor) -> tuple[str, float]:
    """Description of gradients whose shares are alike, and how far these are from 1."""
    share = float(shares.mean())
    word = "doubled" if abs(share - 2) < 0.1 else "too small" if share < 1 else "too large"
    return f"{what} {'lost' if abs(share) < 0.1 else word}", share - 1


def _spread(values: torch.Tensor) -> float:
    return float(values.max() / values.min()) - 1


def _held(values: Iterable[torch.Tensor], scale: float = 1.0) -> str:
    """The 16-bit format that holds all of the values at the scale that they were rounded at; empty for none."""
    whole = torch.cat([(each * scale).float().flatten() for each in values])
    whole = whole[whole != 0]
    held = {name: (whole == whole.to(dtype).float()).sum() for name, dtype in LOW.items()}
    return next((name for name, count in held.items() if count > 0.999 * len(whole)), "")


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).double()


def _names(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) > 1)}, such as {names[0]}"
