"""Judges recorded steps: what is wrong with them, in order of severity."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision.dtypes import DTYPES
from precision.tolerance import relative, unit_roundoff
from tools.audit.gradients import Fit, Micro, NotRecomputed, Objective, fit, recompute, rounded_sum
from tools.audit.recorded import Recorded, Step

SEVERITY = ("masters", "loss", "gradients", "reduction", "clipping", "ranks", "updates", "dtypes", "learning rate")
"""Kinds of findings, the gravest first."""
ADAMW = ("AdamW", "FusedAdam", "DeepSpeedCPUAdam")
_NARROW = ("torch.bfloat16", "torch.float16")
_SHARED = {"norm": "gradient norm", "scale": "loss scale", "groups": "optimizer settings", "applied": "skip decision"}
LOW = {"BF16": torch.bfloat16, "FP16": torch.float16}


@dataclass
class Finding:
    """One thing that is wrong in a step: `what` reads the same in every step, `size` is the error's share."""

    kind: str
    what: str
    size: float
    step: int
    detail: str = ""


@dataclass
class Judged:
    """Findings, what could not be checked and why, and the figures of each step."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def merged(self) -> Iterator[tuple[Finding, list[int]]]:
        """Each finding once, as in the step where it is largest, with all its steps; the gravest first."""
        groups: dict[tuple[str, str], list[Finding]] = {}
        for each in sorted(self.findings, key=lambda each: SEVERITY.index(each.kind)):
            groups.setdefault((each.kind, each.what), []).append(each)
        for same in groups.values():
            yield max(same, key=lambda each: each.size), sorted({each.step for each in same})


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

    def add(self, kind: str, what: str, size: float, detail: str = "") -> None:
        self.found.findings.append(Finding(kind, what, abs(size), self.step.number, detail))

    def judge(self, model: Any, objective: Objective | None, stored: Mapping[str, torch.Tensor] | None) -> None:
        self._masters(stored)
        stale = self._ranks()
        self._batches()
        self._dtypes()
        finite = all(bool(value.isfinite().all()) for value in self.gradient.values())
        if not self.gradient:
            self.found.unchecked["gradients"] = "DeepSpeed hands out no reduced gradient here"
        elif finite:
            if stale:
                self.found.unchecked["gradients and losses"] = "they were computed with other weights than the recorded"
            elif objective is not None:
                try:
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
        if self.done:
            return
        rounded, unsure = _held(self.before.values()), "whether masters start rounded"
        if stored is None:
            if rounded and self.run["compute"] != "fp32":
                self.found.unchecked[unsure] = f"they start as {rounded} numbers; give --model, where the run began"
            return
        off = sum(float((self.before[name].double() - value.double()).square().sum()) for name, value in stored.items())
        apart = math.sqrt(off / sum(float(value.double().square().sum()) for value in stored.values()))
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
            if name in self.before and list(self.before[name].shape) == self.run["parameters"][name][0]:
                held = self.before[name].to(DTYPES[self.run["compute"]]).double()
                slack = 1e-9 * float(held.abs().sum() + held.square().sum())
                right = float(held.sum()), float(held.square().sum())
                if any(abs(one - other) > slack for one, other in zip(sums, right, strict=True)):
                    stale.append(name)
        if stale:
            what = "the model computes with other weights than its rounded masters"
            self.add("ranks", what, len(stale) / len(self.before), _names(stale))
        return bool(stale)

    def _batches(self) -> None:
        seen: dict[bytes, tuple[int, str]] = {}
        for each in (self.last.step, self.step) if self.last is not None else (self.step,):
            for rank, facts in enumerate(each.ranks):
                for number in range(len(facts["micros"])):
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

    def _gradients(self, micros: list[Micro]) -> None:
        """Which loss was trained, and whether the reduced gradient is its."""
        low, counted = self.run["compute"] != "fp32", [each for each in micros if each.counted]
        if not counted:
            raise NotRecomputed("no label of the step counts")
        total = sum(each.counted for each in counted)
        mean = sum(each.exact_loss for each in counted) / total
        noise = max(relative(abs(each.plain_loss - each.exact_loss), abs(each.exact_loss)) for each in counted)
        bound = 3 * noise + (2e-3 if low else 1e-4)
        weights = torch.tensor([each.reported / each.plain_loss for each in counted], dtype=torch.float64)
        counts = torch.tensor([each.counted for each in counted], dtype=torch.float64)
        ratio, own = weights * total, weights * counts * len(micros)
        least, most, middle = float(ratio.min()), float(ratio.max()), float(ratio.mean())
        self.row |= {"loss": sum(each.reported for each in micros), "exact_loss": mean}
        if most / least - 1 > 2 * bound:
            what = "the loss is a mean of the micro-batches' means, not of all that counts"
            if float(own.max() / own.min()) - 1 > 2 * bound:
                what = "the loss that is trained is not that of the recorded labels"
            off = _apart(counted, weights, torch.full_like(weights, 1 / total))
            self.add("loss", what, off, f"labels count {least:.2f} to {most:.2f} times; the gradient is {off:.1%} off")
        elif abs(middle - 1) > bound:
            what = "the loss that is trained is a multiple of the mean over all that counts"
            self.add("loss", what, middle - 1, f"{middle:.4g} times")
        said = self.recorded.reported.get(self.step.number)
        if said is not None and abs(said / mean - 1) > bound + 1e-4 / mean:
            what = "the loss that is reported is not the mean over all that counts"
            self.add("loss", what, said / mean - 1, f"{said:.6g} for {mean:.6g}")
        fitted = fit(self.gradient, counted, weights, 0.02 if low else 1e-3)
        self.row |= {"reported": said, "gradient_error": fitted.error, "noise": fitted.noise}
        self.row["shares"] = fitted.overall.tolist()
        rounding, name = 0.0, _held(self.gradient.values(), self.scale)
        if name and len(micros) > 1:
            rounding = rounded_sum(counted, weights, LOW[name])
            told = f"rounding the sums costs {rounding:.1e} of the gradient"
            self.add("reduction", f"gradients are summed in {name}", rounding, told)
        if fitted.error > 2 * (fitted.noise + rounding) + (2e-3 if low else 2e-5):
            told = f"{fitted.error:.1e} of it, where the dtype explains {fitted.noise:.1e}"
            what = "the reduced gradient is not what plain torch makes of the micro-batches"
            self.add("gradients", what, fitted.error, told)
        else:
            self._shares(counted, fitted, 0.02 if low else 1e-3)

    def _shares(self, micros: list[Micro], fitted: Fit, tolerance: float) -> None:
        told = _told(micros, fitted.overall, tolerance)
        if self.scale != 1.0 and bool(((fitted.overall * self.scale - 1).abs() < 0.05).all()):
            told = {"the gradient is divided by a loss scale that the loss was not multiplied by": 1 - 1 / self.scale}
        listed = ", ".join(f"{share:.3g}" for share in fitted.overall.tolist())
        for what, size in told.items():
            self.add("gradients", what, size, f"{listed} of the micro-batches' gradients")
        groups: dict[str, list[str]] = {}
        for name, shares in fitted.deviating.items():
            for what in _told(micros, shares, tolerance):
                groups.setdefault(what, []).append(name)
        for what, names in groups.items():
            size = max(abs(float(share) - 1) for name in names for share in fitted.deviating[name])
            self.add("gradients", f"{what}, in some parameters", size, f"{_names(names)} of {fitted.judged}")

    def _norm_and_update(self) -> None:
        clipping, facts = self.run["clipping"], self.facts
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
            self.found.unchecked["clipping and updates"] = f"the rule of {self.run['optimizer']} is not known here"
        elif not facts["moments_after"]:
            self.found.unchecked["clipping and updates"] = "the optimizer's moments cannot be read"
        else:
            self._factor(norm, clipping)
            self._update()

    def _group(self, name: str) -> dict[str, Any]:
        group: dict[str, Any] = self.facts["groups"][self.run["parameters"][name][3] or 0]
        return group

    def _factor(self, norm: float, clipping: float) -> None:
        """Factor on the gradient before it came to the optimizer, read from its first moment."""
        start, end = self.step.named("exp_avg/before"), self.step.named("exp_avg/after")
        dot = square = size = 0.0
        for name, value in self.gradient.items():
            beta = self._group(name)["betas"][0]
            added = _flat(end[name]) - (beta * _flat(start[name]) if name in start else 0.0)
            way = (1 - beta) * value
            dot, square, size = dot + float(added @ way), square + float(way @ way), size + float(added @ added)
        if not square or not size:
            return
        factor, expected = dot / square, min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0
        self.row |= {"factor": factor, "expected_factor": expected}
        if abs(factor / expected - 1) <= 2e-3:
            if math.sqrt(max(0.0, size - factor * dot) / size) > 0.02:
                self.add(
                    "clipping", "parameters' gradients are multiplied by different factors", 1 - factor * dot / size
                )
            return
        scaled = min(1.0, clipping / (norm * self.scale)) if clipping else 1.0
        if self.scale != 1.0 and abs(factor / scaled - 1) < 2e-2:
            what = "gradients are clipped by the norm of the scaled gradient"
        elif any(abs(factor * scale / expected - 1) < 2e-3 for scale in (self.scale, 1 / self.scale)):
            what = "gradients are unscaled once too often, or not at all"
        elif clipping and expected < factor < 1.001:
            what = "gradients are clipped by the norm of a part of them"
        else:
            what = "gradients are multiplied by another factor than clipping's"
        implied = f", as of a norm of {clipping / factor:.4g} where it is {norm:.4g}" if clipping and factor else ""
        self.add("clipping", what, factor / expected - 1, f"times {factor:.4g} for {expected:.4g}{implied}")

    def _update(self) -> None:
        """The masters against AdamW in FP64 on the moments that the optimizer had."""
        count = self.facts["optimizer_step_after"]
        if count is not None and count != self.done + 1:
            what = "the optimizer has counted other updates than were made"
            self.add("updates", what, count / (self.done + 1) - 1, f"{count:.0f} for {self.done + 1:.0f}")
        count = count or self.done + 1
        moments = [
            self.step.named(f"{key}/{when}") for key in ("exp_avg", "exp_avg_sq") for when in ("before", "after")
        ]
        factor = self.row.get("factor", 1.0)
        dot = square = slack = second_off = second_size = 0.0
        still = every = 0
        rows = []
        for name, value in self.after.items():
            group, start = self._group(name), self._start(name, self.stride).double()
            first, second = _flat(moments[1][name]), _flat(moments[3][name])
            beta1, beta2 = group["betas"]
            way = first / (1 - beta1**count) / ((second / (1 - beta2**count)).sqrt() + group["eps"])
            way = group["lr"] * (way + group["weight_decay"] * start)
            if name in self.gradient:
                square_now = (1 - beta2) * (factor * self.gradient[name]).square()
                kept = beta2 * _flat(moments[2][name]) if name in moments[2] else 0.0
                second_off += float((second - kept - square_now).square().sum())
                second_size += float(second.square().sum())
            change = _flat(value) - start
            rows.append((way, change))
            dot, square = dot - float(change @ way), square + float(way @ way)
            slack += float((start * 2.0**-24).square().sum())
            still, every = still + int(((change == 0) & (way != 0)).sum()), every + int((way != 0).sum())
        if not square:
            return
        ratio = dot / square
        off = sum(float((change + way).square().sum()) for way, change in rows)
        error, around = math.sqrt(off / square), 2e-3 + 6 * math.sqrt(slack / square)
        self.row |= {"lr": [group["lr"] for group in self.facts["groups"]], "lr_ratio": ratio, "update_error": error}
        if second_size and math.sqrt(second_off / second_size) > 5e-4:
            self.add("updates", "the second moment is not that of the gradient", math.sqrt(second_off / second_size))
        if still > 0.05 * every and error > 0.01 or still > 0.5 * every:
            what = "updates are lost to rounding" if still < every else "the update is lost"
            self.add(
                "updates",
                what,
                error,
                f"{still / every:.1%} of the values stand still; {error:.1%} of the update is missing",
            )
        elif error > around and abs(error - abs(ratio - 1)) < 0.1 * error + around:
            rate = self.row["lr"][0]
            self.add(
                "learning rate",
                "masters move by another learning rate than the optimizer's",
                ratio - 1,
                f"{ratio * rate:.4g} for {rate:.4g}",
            )
        elif error > around:
            self.add("updates", "masters do not move as AdamW in FP64 moves them", error, f"{error:.1e} of the update")

    def _schedule(self) -> None:
        at, what = self.facts["schedule"], "the step of the learning rate"
        if at is None:
            self.found.unchecked[what] = "the probe knows no scheduler that counts; give it `scheduler=`"
        elif at != self.done and at == self.done * self.run["world"]:
            self.found.unchecked[what] = (
                "the schedule is stepped once for each process, as Accelerate does: it has to be so much longer"
            )
        elif at != self.done:
            side = "ahead of" if at > self.done else "behind"
            self.add(
                "learning rate",
                f"the schedule is {side} the updates",
                abs(at - self.done) / max(1.0, self.done),
                f"at {at:.0f} after {self.done:.0f} updates",
            )


def _told(micros: list[Micro], shares: torch.Tensor, tolerance: float) -> dict[str, float]:
    """Meaning of shares other than 1, with how far off they are."""
    off = (shares - 1).abs() > tolerance
    if not bool(off.any()):
        return {}
    if float(shares.max() - shares.min()) <= 4 * tolerance * max(1.0, float(shares.abs().max())):
        return {f"the reduced gradient is {_times(float(shares.mean()))}": float(shares.mean()) - 1}
    found = {}
    ranks = {
        rank: [at for at, each in enumerate(micros) if each.rank == rank] for rank in {each.rank for each in micros}
    }
    for rank, places in ranks.items():
        if bool(off[places].all()) and float(shares[places].max() - shares[places].min()) <= 8 * tolerance:
            found[f"rank {rank}'s gradients are {_times(float(shares[places].mean()))}"] = (
                float(shares[places].mean()) - 1
            )
            continue
        for at in places:
            if off[at]:
                found[f"the gradient of micro-batch {micros[at].number + 1} is {_times(float(shares[at]))}"] = (
                    float(shares[at]) - 1
                )
    return found


def _times(share: float) -> str:
    if abs(share) < 0.1:
        return "lost"
    return "doubled" if abs(share - 2) < 0.1 else "too small" if share < 1 else "too large"


def _apart(micros: list[Micro], weights: torch.Tensor, right: torch.Tensor) -> float:
    """The distance of two weighted sums of gradients."""
    off = size = 0.0
    for name in micros[0].exact:
        rows = torch.stack([each.exact[name] for each in micros])
        off, size = off + float(((weights - right) @ rows).square().sum()), size + float((right @ rows).square().sum())
    return relative(math.sqrt(off), math.sqrt(size))


def _held(values: Iterable[torch.Tensor], scale: float = 1.0) -> str:
    """The 16-bit format that holds all of the values at the scale that they were rounded at; empty for none."""
    tensors = [(each * scale).float() for each in values]
    every = sum(int((each != 0).sum()) for each in tensors)
    for name, dtype in LOW.items():
        if (
            every
            and sum(int(((each == each.to(dtype).float()) & (each != 0)).sum()) for each in tensors) > 0.999 * every
        ):
            return name
    return ""


def _flat(values: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1).double()


def _names(names: list[str]) -> str:
    return f"{len(names)} parameter{'s' * (len(names) > 1)}, such as {names[0]}"
