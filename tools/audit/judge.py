"""What is wrong in recorded steps, in order of severity."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from precision.tolerance import unit_roundoff
from tools.audit.gradients import DTYPES, Fit, Micro, NotRecomputed, Objective, fit, recompute, rounded_sum
from tools.audit.recorded import Recorded, Step

SEVERITY = ("masters", "loss", "gradients", "reduction", "clipping", "ranks", "updates", "dtypes", "learning rate")
"""Kinds of findings, the gravest first."""


@dataclass
class Finding:
    """One thing that is wrong in a step. `size` is how much, as a share of what is right; `what` is the same text in
    every step that has it."""

    kind: str
    what: str
    size: float
    step: int
    detail: str = ""


@dataclass
class Judged:
    """Findings, what could not be checked, and what was measured of each step."""

    findings: list[Finding] = field(default_factory=list)
    unchecked: dict[str, str] = field(default_factory=dict)
    measured: list[dict[str, Any]] = field(default_factory=list)

    def add(self, kind: str, what: str, size: float, step: Step, detail: str = "") -> None:
        """Add a finding."""
        self.findings.append(Finding(kind, what, abs(size), step.number, detail))


def judge(
    recorded: Recorded, model: Any, objective: Objective | None, stored: Mapping[str, torch.Tensor] | None, why: str
) -> Judged:
    """model, objective: None where gradients cannot be recomputed, and `why`. stored: the weights of --model."""
    found = Judged()
    if why:
        found.unchecked["gradients and losses"] = why
    if recorded.incomplete:
        found.unchecked[f"step {recorded.incomplete[0]}"] = "a crash or a kill cut its files short"
    last: Step | None = None
    for number in recorded.numbers:
        step = recorded.step(number)
        row: dict[str, Any] = {"step": number, "applied": step.facts["applied"]}
        found.measured.append(row)
        _masters(found, recorded, step, stored)
        _ranks(found, recorded, step)
        _batches(found, step, last)
        _inner(found, recorded, step)
        gradient = {
            name: value.double().reshape(-1) / step.facts["scale"] for name, value in step.named("gradient").items()
        }
        finite = all(bool(value.isfinite().all()) for value in gradient.values())
        if not gradient:
            found.unchecked["gradients"] = "DeepSpeed hands out no reduced gradient here"
        if model is not None and objective is not None and gradient and finite:
            try:
                _gradients(found, recorded, step, recompute(model, recorded, step, objective), gradient, row)
            except NotRecomputed as error:
                found.unchecked["gradients and losses"] = str(error)
        if finite and gradient:
            _clipping_and_update(found, recorded, step, gradient, row)
        _schedule(found, step)
        if last is not None and last.number + 1 == number:
            _continued(found, last, step)
        last = step
    found.findings.sort(key=lambda each: (SEVERITY.index(each.kind), each.step, -each.size))
    return found


def _masters(found: Judged, recorded: Recorded, step: Step, stored: Mapping[str, torch.Tensor] | None) -> None:
    low = [dtype for dtype in step.facts["fp32"] if dtype not in ("torch.float32", "torch.float64")]
    if low:
        found.add("masters", f"the optimizer steps {', '.join(low)} numbers: there are no FP32 masters", 1.0, step)
    after = step.named("after")
    if after and step.facts["applied"] and not low:
        for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
            if _held_in(after.values(), dtype) > 0.999:
                found.add("masters", f"masters are FP32 tensors of {name} numbers after an update", 1.0, step)
                break
    if _done(step) or step.facts["applied_before"]:
        return
    before = step.named("before")
    rounded = next(
        (
            name
            for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16))
            if _held_in(before.values(), dtype) > 0.999
        ),
        None,
    )
    if stored is None:
        if rounded and recorded.facts["compute"] != "fp32":
            found.unchecked["whether masters start rounded"] = (
                f"they start as {rounded} numbers; give --model, the checkpoint that the run began with"
            )
        return
    apart = _distance({name: before[name] for name in stored}, stored)
    if apart > 0.01:
        found.unchecked["whether masters start rounded"] = (
            f"the weights of --model are {apart:.0%} from those that the run began with"
        )
    elif apart > 1e-5:
        told = f"masters start as {rounded} numbers" if rounded else "masters do not start as the checkpoint's weights"
        found.add(
            "masters", f"{told}, though the checkpoint has more digits", apart, step, f"{apart:.1e} of the weights lost"
        )


def _ranks(found: Judged, recorded: Recorded, step: Step) -> None:
    first = step.facts
    for rank in step.ranks[1:]:
        for what in ("weights", "gradients"):
            mine, other = first["sums"][what], rank["sums"][what]
            names = [name for name in mine if mine[name] != other.get(name)]
            if names and (what == "weights" or recorded.facts["stage"] == 0):
                off = max(_relative(other[name][1], mine[name][1]) for name in names if name in other)
                found.add(
                    "ranks",
                    f"rank {rank['rank']} has other {what} than rank 0",
                    off,
                    step,
                    f"{len(names)} parameters, {names[0]} first",
                )
        for key, what in (
            ("norm", "gradient norm"),
            ("scale", "loss scale"),
            ("groups", "optimizer settings"),
            ("applied", "verdict on whether the step is applied"),
        ):
            if first[key] != rank[key]:
                found.add(
                    "ranks",
                    f"rank {rank['rank']} has another {what} than rank 0",
                    1.0,
                    step,
                    f"{rank[key]} and {first[key]}"[:200],
                )
    weights, low = first["sums"]["weights"], DTYPES[recorded.facts["compute"]]
    stale = []
    for name, master in step.named("before").items():
        if name in weights and master.shape == torch.Size(recorded.facts["parameters"][name][0]):
            held = master.to(low).double()
            if _relative(weights[name][1], float(held.square().sum())) > 1e-9 or abs(
                weights[name][0] - float(held.sum())
            ) > 1e-9 * float(held.abs().sum()):
                stale.append(name)
    if stale:
        found.add(
            "ranks",
            "rank 0 computes with other weights than its rounded masters",
            len(stale) / len(weights),
            step,
            f"{len(stale)} parameters, {stale[0]} first",
        )


def _batches(found: Judged, step: Step, last: Step | None) -> None:
    seen: dict[bytes, str] = {}
    steps = [last, step] if last is not None and last.number + 1 == step.number else [step]
    for each in steps:
        for rank, facts in enumerate(each.ranks):
            for number in range(len(facts["micros"])):
                calls = each.inputs(rank, number)
                ids = next((call["input_ids"] for call in calls if "input_ids" in call), None)
                if ids is None:
                    continue
                key, here = ids.numpy().tobytes(), f"rank {rank}, micro-batch {number + 1}"
                if key in seen and each is step:
                    what = (
                        "ranks train on the same batch"
                        if seen[key].split(",")[0] != here.split(",")[0]
                        else "a batch is trained on again"
                    )
                    found.add("loss", what, 1.0, step, f"{here} has the tokens of {seen[key]}")
                seen[key] = here + ("" if each is step else f" of step {each.number}")
                labels = next((call["labels"] for call in calls if "labels" in call), None)
                if each is step and labels is not None and labels.shape == ids.shape:
                    _labels(found, step, ids, labels, here)


def _labels(found: Judged, step: Step, ids: torch.Tensor, labels: torch.Tensor, here: str) -> None:
    counted = labels >= 0
    same = float((labels == ids)[counted].float().mean()) if bool(counted.any()) else 1.0
    ahead = float((labels[..., :-1] == ids[..., 1:])[counted[..., :-1]].float().mean())
    if same < 0.9 and ahead > 0.9:
        found.add(
            "loss",
            "labels are shifted before the model shifts them: it learns the token after the next",
            1.0,
            step,
            here,
        )


def _inner(found: Judged, recorded: Recorded, step: Step) -> None:
    for dtype in {micro["loss_dtype"] for rank in step.ranks for micro in rank["micros"]}:
        if dtype in ("torch.bfloat16", "torch.float16"):
            found.add(
                "dtypes",
                f"the loss is {dtype.removeprefix('torch.')}",
                unit_roundoff(getattr(torch, dtype.removeprefix("torch."))),
                step,
            )
    low = [
        f"{name}: {dtype.removeprefix('torch.')}"
        for name, dtype in step.facts["inner"].items()
        if dtype in ("torch.bfloat16", "torch.float16")
    ]
    cast = any(call["autocast"] for micro in step.facts["micros"] for call in micro["calls"])
    if low and recorded.facts["compute"] == "fp32" and not cast:
        found.add("dtypes", "modules of an FP32 run return 16 bits", 1.0, step, ", ".join(low))


def _gradients(
    found: Judged,
    recorded: Recorded,
    step: Step,
    micros: list[Micro],
    gradient: dict[str, torch.Tensor],
    row: dict[str, Any],
) -> None:
    low = recorded.facts["compute"] != "fp32"
    total = sum(each.counted for each in micros)
    if not total:
        raise NotRecomputed("no label of the step counts")
    counted = [each for each in micros if each.counted]
    mean, given = sum(each.exact_loss for each in counted) / total, sum(each.reported for each in micros)
    noise = max(_relative(each.plain_loss, each.exact_loss) for each in counted)
    bound = 3 * noise + (2e-3 if low else 1e-4)
    weights = torch.tensor([each.reported / each.plain_loss for each in counted], dtype=torch.float64)
    ratio = weights * total
    row |= {"loss": given, "exact_loss": mean}
    own = torch.tensor([each.reported * len(micros) / (each.plain_loss / each.counted) for each in counted])
    whole = float((weights * torch.tensor([each.plain_loss for each in counted])).sum() / mean)
    if float(ratio.max() / ratio.min()) - 1 > 2 * bound and float(own.max() - own.min()) <= 2 * bound * float(
        own.max()
    ):
        off = _of_weights(counted, weights, torch.full_like(weights, 1 / total))
        found.add(
            "loss",
            "the loss is a mean of the micro-batches' means, not of all labels",
            off,
            step,
            f"a label counts {float(ratio.min()):.2f} to {float(ratio.max()):.2f} times; the gradient is {off:.1%} off",
        )
    elif float(ratio.max() / ratio.min()) - 1 > 2 * bound:
        off = float((ratio - 1).abs().max())
        found.add(
            "loss",
            "the loss that is trained is not that of the recorded labels",
            off,
            step,
            f"micro-batches' losses are {float(ratio.min()):.3f} to {float(ratio.max()):.3f} times it",
        )
    elif abs(float(ratio.mean()) - 1) > bound:
        found.add(
            "loss",
            "the trained loss is a multiple of the mean over all labels",
            float(ratio.mean()) - 1,
            step,
            f"{float(ratio.mean()):.4g} times",
        )
    said = recorded.reported.get(step.number)
    if said is not None and abs(said / mean - 1) > bound + 1e-4 / mean:
        found.add(
            "loss",
            "the loss that is reported is not the mean over all labels",
            said / mean - 1,
            step,
            f"{said:.6g} for {mean:.6g}",
        )
    row["reported"] = said
    tolerance = 0.03 if low else 1e-3
    fitted = fit(gradient, counted, weights, tolerance)
    row |= {"gradient_error": fitted.error, "noise": fitted.noise, "shares": fitted.overall.tolist()}
    if fitted.unknown:
        row["not_fitted"] = len(fitted.unknown)
    _shares(found, step, counted, fitted, tolerance)
    for name, dtype in (("BF16", torch.bfloat16), ("FP16", torch.float16)):
        if low and len(micros) > 1 and _held_in(gradient.values(), dtype, step.facts["scale"]) > 0.999:
            off = rounded_sum(counted, weights, dtype)
            found.add(
                "reduction",
                f"gradients are summed in {name}",
                off,
                step,
                f"rounding the sums costs {off:.1e} of the gradient",
            )
            break
    else:
        beyond = 2 * fitted.noise + (1e-2 if low else 2e-5)
        if fitted.error > beyond and not fitted.deviating:
            found.add(
                "gradients",
                "the reduced gradient is not the micro-batches'",
                fitted.error,
                step,
                f"{fitted.error:.1e} off, where the dtype explains {fitted.noise:.1e}",
            )


def _of_weights(micros: list[Micro], weights: torch.Tensor, right: torch.Tensor) -> float:
    off = size = 0.0
    for name in micros[0].exact:
        rows = torch.stack([each.exact[name] for each in micros])
        off, size = off + float(((weights - right) @ rows).square().sum()), size + float((right @ rows).square().sum())
    return math.sqrt(off / size) if size else 0.0


def _shares(found: Judged, step: Step, micros: list[Micro], fitted: Fit, tolerance: float) -> None:
    def told(shares: torch.Tensor) -> list[tuple[str, float, str]]:
        off = (shares - 1).abs() > tolerance
        if not bool(off.any()):
            return []
        same = float(shares.max() - shares.min()) <= 4 * tolerance * max(1.0, float(shares.abs().max()))
        if same:
            mean = float(shares.mean())
            return [(f"the reduced gradient is {_times(mean)}", mean - 1, f"{mean:.4g} times what the losses mean")]
        parts = []
        for rank in sorted({each.rank for each in micros}):
            mine = [place for place, each in enumerate(micros) if each.rank == rank]
            if all(off[place] for place in mine) and float(shares[mine].max() - shares[mine].min()) <= 8 * tolerance:
                parts.append(
                    (
                        f"rank {rank}'s gradients are {_times(float(shares[mine].mean()))}",
                        float(shares[mine].mean()) - 1,
                        "",
                    )
                )
                continue
            for place in mine:
                if off[place]:
                    share = float(shares[place])
                    parts.append(
                        (
                            f"the gradient of micro-batch {micros[place].number + 1} is {_times(share)}",
                            share - 1,
                            f"rank {rank}: {share:.3f} of it",
                        )
                    )
        return parts

    for what, size, detail in told(fitted.overall):
        found.add("gradients", what, size, step, detail)
    groups: dict[str, list[str]] = {}
    sizes: dict[str, float] = {}
    for name, shares in fitted.deviating.items():
        for what, size, _ in told(shares) or [("some gradients have other shares than the rest", 1.0, "")]:
            groups.setdefault(what, []).append(name)
            sizes[what] = max(sizes.get(what, 0.0), abs(size))
    for what, names in groups.items():
        found.add(
            "gradients",
            f"{what}, in some parameters",
            sizes[what],
            step,
            f"{len(names)} of {fitted.judged}: {', '.join(names[:3])}",
        )


def _times(share: float) -> str:
    if abs(share) < 0.1:
        return "lost"
    if abs(share - 2) < 0.2:
        return "doubled"
    return "too small" if share < 1 else "too large"


def _clipping_and_update(
    found: Judged, recorded: Recorded, step: Step, gradient: dict[str, torch.Tensor], row: dict[str, Any]
) -> None:
    facts, scale, clipping = step.facts, step.facts["scale"], recorded.facts["clipping"]
    norm = math.sqrt(sum(facts["sums"]["squares"].values())) / scale
    row |= {"norm": facts["norm"], "exact_norm": norm, "scale": scale}
    if facts["norm"] is None or facts["norm"] == 0.0:
        found.unchecked["the reported norm"] = "the engine reports none"
    elif facts["applied"] and abs(facts["norm"] / norm - 1) > 1e-3:
        found.add(
            "clipping",
            "the reported norm is not the gradient's",
            facts["norm"] / norm - 1,
            step,
            f"{facts['norm']:.6g} for {norm:.6g}",
        )
    before, after = step.named("before"), step.named("after")
    if not facts["applied"]:
        moved = [
            name for name in after if not torch.equal(_part(before[name], facts["stride"]), after[name].reshape(-1))
        ]
        if moved:
            found.add("updates", "masters move in a step that was skipped", 1.0, step, f"{len(moved)} parameters")
        return
    if recorded.facts["optimizer"] not in ("AdamW", "FusedAdam", "DeepSpeedCPUAdam") or not facts["moments_after"]:
        found.unchecked["clipping and updates"] = (
            f"the update of {recorded.facts['optimizer']} is not known here"
            if facts["moments_after"]
            else "the optimizer's moments cannot be read"
        )
        return
    moments = {key: (step.named(f"{key}/before"), step.named(f"{key}/after")) for key in ("exp_avg", "exp_avg_sq")}
    groups = {name: facts["groups"][row[3] or 0] for name, row in recorded.facts["parameters"].items() if row[2]}
    _factor(
        found,
        step,
        gradient,
        moments,
        groups,
        min(1.0, clipping / (norm + 1e-6)) if clipping else 1.0,
        norm,
        clipping,
        row,
    )
    _update(found, step, moments, groups, before, after, row)


def _factor(
    found: Judged,
    step: Step,
    gradient: Mapping[str, torch.Tensor],
    moments: Any,
    groups: Mapping[str, Any],
    expected: float,
    norm: float,
    clipping: float,
    row: dict[str, Any],
) -> None:
    """What the gradient was multiplied by before it came to the optimizer, read from its first moment."""
    dot = square = left = 0.0
    for name, value in gradient.items():
        beta = groups[name]["betas"][0]
        start, end = (kept.get(name) for kept in moments["exp_avg"])
        added = end.double().reshape(-1) - (beta * start.double().reshape(-1) if start is not None else 0.0)
        way = (1 - beta) * value
        dot, square, left = dot + float(added @ way), square + float(way @ way), left + float(added @ added)
    factor = dot / square if square else math.nan
    row |= {"factor": factor, "expected_factor": expected}
    error = math.sqrt(max(0.0, left - factor * dot) / left) if left else 0.0
    if abs(factor / expected - 1) > 2e-3:
        scaled = min(1.0, clipping / (norm * step.facts["scale"] + 1e-6)) if clipping else 1.0
        if step.facts["scale"] != 1.0 and abs(factor / scaled - 1) < 2e-2:
            what = "gradients are clipped by the norm of the scaled gradient"
        elif (
            abs(factor * step.facts["scale"] / expected - 1) < 2e-3
            or abs(factor / step.facts["scale"] / expected - 1) < 2e-3
        ):
            what = "gradients are unscaled once too often, or not at all"
        elif clipping and factor > expected:
            what = (
                "gradients are clipped by the norm of a part of them"
                if factor <= 1.0 + 1e-3
                else "gradients grow before the update"
            )
        else:
            what = "gradients shrink before the update"
        implied = f", as of a norm of {clipping / factor:.4g} where it is {norm:.4g}" if clipping else ""
        found.add(
            "clipping", what, factor / expected - 1, step, f"multiplied by {factor:.4g} for {expected:.4g}{implied}"
        )
    elif error > 0.02:
        found.add(
            "clipping", "parameters' gradients are multiplied by different factors before the update", error, step
        )


def _update(
    found: Judged, step: Step, moments: Any, groups: Mapping[str, Any], before: Any, after: Any, row: dict[str, Any]
) -> None:
    stride, count = step.facts["stride"], step.facts["optimizer_step_after"]
    done = step.facts["applied_before"] if not _done(step) else step.facts["optimizer_step"]
    if count is not None and count != done + 1:
        found.add(
            "updates", f"the optimizer counts {count:.0f} updates after {done + 1:.0f}", count / (done + 1) - 1, step
        )
    count = count or done + 1
    dot = square = moved = off = slack = 0.0
    rows = []
    for name, now in after.items():
        group, start = groups[name], _part(before[name], stride).double()
        first, second = (moments[key][1][name].double().reshape(-1) for key in ("exp_avg", "exp_avg_sq"))
        beta1, beta2 = group["betas"]
        way = (
            first / (1 - beta1**count) / ((second / (1 - beta2**count)).sqrt() + group["eps"])
            + group["weight_decay"] * start
        )
        change = now.double().reshape(-1) - start
        rows.append((group["lr"], way, change))
        dot, square = dot - float(change @ way) * group["lr"], square + float(way @ way) * group["lr"] ** 2
        slack += float((start * 2.0**-24).square().sum())
    ratio = dot / square if square else 1.0
    for rate, way, change in rows:
        off, moved = off + float((change + rate * way).square().sum()), moved + float((rate * way).square().sum())
    error = math.sqrt(off / moved) if moved else 0.0
    still = sum(int(((change == 0) & (way != 0)).sum()) for _, way, change in rows) / max(
        1, sum(int((way != 0).sum()) for _, way, _ in rows)
    )
    row |= {"lr": [group["lr"] for group in step.facts["groups"]], "lr_ratio": ratio, "update_error": error}
    around = 2e-3 + 6 * math.sqrt(slack / moved) if moved else 1.0
    if (
        moved
        and still > 0.5
        or abs(ratio - 1) < 0.5
        and error > max(0.01, 6 * math.sqrt(slack / moved))
        and still > 0.05
    ):
        found.add(
            "updates",
            "updates are lost to rounding" if still < 1 else "the update is lost",
            max(error, still),
            step,
            f"{still:.1%} of the values stand still; {error:.1%} of the update is missing",
        )
    elif abs(ratio - 1) > around and abs(error - abs(ratio - 1)) < 0.1 * abs(ratio - 1) + around:
        found.add(
            "learning rate",
            "masters move by another learning rate than the optimizer's",
            ratio - 1,
            step,
            f"{ratio:.4f} times {row['lr'][0]:.4g}",
        )
    elif error > around:
        found.add(
            "updates", "masters do not move as AdamW in FP64 moves them", error, step, f"{error:.1e} of the update"
        )


def _schedule(found: Judged, step: Step) -> None:
    at, done = step.facts["schedule"], _done(step) or step.facts["applied_before"]
    if at is None or isinstance(at, str):
        found.unchecked["the learning rate's step"] = "the probe has no scheduler that counts; give it `scheduler=`"
    elif at != done and step.facts["world"] > 1 and at == done * step.facts["world"]:
        found.unchecked["the learning rate's step"] = (
            "the schedule is stepped once per process, as Accelerate does; it has to be that much longer"
        )
    elif at != done:
        found.add(
            "learning rate",
            f"the schedule is {abs(at - done):.0f} step{'s' * (abs(at - done) != 1)} {'ahead of' if at > done else 'behind'} the updates",
            abs(at - done) / max(1.0, done),
            step,
            f"at {at:.0f} after {done:.0f} updates",
        )


def _continued(found: Judged, last: Step, step: Step) -> None:
    stride, after, before = last.facts["stride"], last.named("after"), step.named("before")
    other = [name for name, value in after.items() if not torch.equal(value.reshape(-1), _part(before[name], stride))]
    if other:
        found.add(
            "updates",
            "masters change between two steps",
            len(other) / len(after),
            step,
            f"{len(other)} parameters since step {last.number}, {other[0]} first",
        )


def _done(step: Step) -> float:
    """Updates that the optimizer had made; 0 where its moments are nothing yet."""
    second = step.named("exp_avg_sq/before")
    made = any(bool(value.any()) for value in second.values())
    return float(step.facts["optimizer_step"] or 0.0) if made else 0.0


def _part(values: torch.Tensor, stride: int) -> torch.Tensor:
    return values.reshape(-1)[::stride]


def _held_in(values: Any, dtype: torch.dtype, scale: float = 1.0) -> float:
    """The share of values other than 0 that a dtype holds; at the scale that they were rounded at."""
    counts = [
        (int(((each * scale).float() == (each * scale).to(dtype).float())[each != 0].sum()), int((each != 0).sum()))
        for each in values
    ]
    return sum(count[0] for count in counts) / max(1, sum(count[1] for count in counts))


def _distance(found: Mapping[str, torch.Tensor], known: Mapping[str, torch.Tensor]) -> float:
    off = sum(float((found[name].double() - value.double()).square().sum()) for name, value in known.items())
    return math.sqrt(off / sum(float(value.double().square().sum()) for value in known.values()))


def _relative(found: float, right: float) -> float:
    return abs(found - right) / abs(right) if right else abs(found)


def merged(findings: list[Finding]) -> Iterator[tuple[Finding, list[int]]]:
    """Each finding once, of the step where it is largest, with all its steps."""
    groups: dict[tuple[str, str], list[Finding]] = {}
    for each in findings:
        groups.setdefault((each.kind, each.what), []).append(each)
    for same in groups.values():
        yield max(same, key=lambda each: each.size), sorted({each.step for each in same})
