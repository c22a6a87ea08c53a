"""The report of a parity run, from the content of its `parity.json` alone: `parity.md`, `parity.html` and two plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.parity.judge_runs import confidence_line
from tools.parity.judge_steps import gradient_errors, module_errors, worst_of
from tracking.pages.document import write_document
from tracking.pages.markdown import Table, code, page, section, text
from tracking.plots import figure, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE = (12, 4.6)
_FP32, _MINE, _BOUND = "#7f7f7f", "#1f4e79", "#c00000"
_COLOURS = ("#1f4e79", "#d1660f", "#2e7d32", "#7b3fa0", "#00838f", "#a15c00")
_WORDS = {
    "finished_runs": "runs that reached their last step",
    "validation_delta": "validation loss, distance from FP32",
    "loss_gap": "training loss, largest distance of running medians",
    "grad_norm_ratio": "gradient norm over FP32's, median",
    "skipped_share": "skipped steps, once the loss scale has settled",
    "nonfinite_events": "non-finite values not handled by the loss scale",
    "fp8_products": "products of an FP8 layer against FP8's definition, in roundings",
    "module_error": "a module's own error, on the inputs it got",
    "accumulation_error": "sum of known gradients, relative error",
    "task_loss": "the task's loss and its gradient against FP64 from the same logits, in units of FP32's rounding",
    "dropout": "modules whose dropout differs from the declared rate",
    "every_step": "self-checks of both runs against plain torch, step by step",
    "by_rule": "learning rate and loss scale, replayed by the config's rules",
    "oracle": "steps of the FP32 run, if any, recomputed outside of the engine, in bounds",
    "order": "samples of all steps, and initial weights, by the config's rules",
    "evaluation": "reported evaluations recomputed in plain torch and this dtype, in bounds",
    "fp32_evaluation": "reported evaluations of the FP32 run recomputed in plain torch, in bounds",
    "weighting_error": "gradients against equal weight for every label",
    "loss_error": "reported loss against the mean over all labels",
    "evaluation_error": "loss of a batch that is evaluated twice",
    "gradient_error": "weight gradients, relative error",
    "gradient_excess": "weight gradients, error in units of plain torch's in this dtype",
    "gradient_cosine": "weight gradients, cosine",
    "sign_agreement": "weight gradients, sign agreement",
    "update_error": "update against FP64 on its own gradient",
    "update_rounding": "masters and moments beyond FP32's rounding of FP64's",
    "grad_norm_error": "reported gradient norm against the gradient's",
    "weight_drift": "weights against their rounded masters",
    "unexplained": "modules with an error that rounding does not explain",
    "applied_points": "points with an applied step",
    "lower_dtypes": "softmax, norm statistics, loss, rotary table in a lower dtype than FP32",
    "restored_share": "points restored with the recorded loss, loss scale, rate and samples",
}
_SHARES = frozenset(
    {"finished_runs", "validation_delta", "loss_gap", "skipped_share", "restored_share", "update_rounding"}
)
_UNITS = {
    "step_seconds": ("step time", "s"),
    "tokens_per_second": ("throughput", "tokens/s"),
    "memory_bytes": ("peak memory of the largest rank", "bytes"),
    "energy_joules": ("energy, start-up included", "J"),
    "cost_per_million_tokens": ("cost per million tokens", ""),
}


def write_report(folder: Path, found: dict[str, Any]) -> Path:
    """Write `parity.md` and `parity.html`, `trajectories.png` and `steps.png` into `folder`; returns the page's path.

    found: the content of parity.json, in which non-finite values are strings.
    """
    runs = sure = cost = steps = ""
    if found["confidence"] is not None:
        with figure(folder / "trajectories.png", *_SIZE, dpi=120) as drawn:
            _draw_trajectories(drawn.subplots(1, 2), found)
        runs = "![loss of both runs, and their difference](trajectories.png)"
        sure = section("How sure", text(confidence_line(found["confidence"])))
        cost = section("Speed, memory and cost", _resources(found["bought"]))
    if any(walk["steps"] for walk in found["walks"]):
        with figure(folder / "steps.png", *_SIZE, dpi=120) as drawn:
            _draw_steps(drawn.subplots(1, 2), found)
        steps = "![error of each module in its output and its gradients, the worst of all steps](steps.png)"
    content = page(
        f"# Parity of {text(found['conditions']['compute'])} with FP32: {found['verdict']}",
        "\n".join(verdict_lines(found)),
        section("Checks", _checks(found["checks"])),
        runs,
        steps,
        sure,
        section("Where they diverge", _divergence(found)),
        cost,
        section("Conditions", _conditions(found["conditions"])),
    )
    return write_document(folder / "parity.md", content, tone="bad" if found["failed"] else "good")


def verdict_lines(found: dict[str, Any]) -> list[str]:
    """The verdict as text: what was compared, how many bounds hold, and each failed check with the modules it names."""
    conditions, checks = found["conditions"], found["checks"]
    bad, places = sum(not check["passed"] for check in checks), len(conditions.get("compared_after") or found["walks"])
    lines = [
        f"**{found['verdict']}**: {text(conditions['compute'])} against FP32 over {conditions['steps']:,} steps, and "
        f"in single steps at {places} place{'s' * (places != 1)}: "
        + (f"{bad} of {len(checks)} checks are beyond their bounds." if bad else f"all {len(checks)} checks hold.")
    ]
    for check in found["checks"]:
        if not check["passed"]:
            names = text(", ".join(check["modules"]) or check["where"])
            lines.append(
                f"- {check['name']}: {_value(check, 'measured')}, bound {_value(check, 'bound')}"
                + (f"; {names}" if names else "")
                + (f" ({text(check['note'])})" if check["note"] else "")
            )
    return lines


def _checks(checks: Sequence[dict[str, Any]]) -> Table:
    rows = [
        (
            _WORDS.get(check["name"], check["name"]) + f" (`{check['name']}`)",
            _value(check, "measured"),
            ("at least " if check["at_least"] else "at most ") + _value(check, "bound"),
            "yes" if check["passed"] else "**no**",
            text("; ".join(filter(None, (check["where"], check["note"] if check["passed"] else "")))),
        )
        for check in checks
    ]
    return Table(("what", "measured", "bound", "holds", "worst at"), rows)


def _divergence(found: dict[str, Any]) -> str:
    step, module = found["first_departure"], found["first_parting"]
    lines = [f"The running medians of the loss exceed the bound from step {step} on."] if step is not None else []
    if step is None and found["confidence"] is not None:
        lines.append("The running medians of the loss stay within the bound from the first step to the last.")
    if module is not None:
        lines.append(
            f"In a single step {code(module['module'])} is the first module, in the order of execution, whose own "
            f"output is off by more than the bound: {_number(module['own_error'])} at step {module['step']}."
        )
    else:
        lines.append("No module's own output is off by more than the bound in any step compared.")
    return " ".join(lines)


def _resources(quantities: dict[str, Any]) -> Table:
    table = Table(("what", "this run", "FP32", "ratio"))
    for name, values in quantities.items():
        words, unit = _UNITS[name]
        mine, other, ratio = values["candidate"], values["fp32"], values["ratio"]
        over = "not reported here" if ratio is None else f"{ratio:.2f}x"
        table.add(words, _quantity(mine, unit), _quantity(other, unit), over)
    return table


def _conditions(conditions: dict[str, Any]) -> Table:
    environment = conditions["environment"]
    versions = environment.get("versions") or {}
    cpu, accelerator = environment.get("cpu") or {}, environment.get("accelerator") or {}
    device = accelerator.get("device", "unknown")
    if device == "cpu":
        device = f"{cpu.get('model')}, {cpu.get('usable_cores')} cores"
    batch = f"{conditions['global_batch']} sequences of {conditions['sequence_length']} tokens"
    named = [name for name in ("python", "torch", "deepspeed", "transformers") if name in versions]
    rows = [
        ("model", f"{text(conditions['model'])}, {conditions['parameters']:,} parameters"),
        ("data fingerprint", code(conditions["data"])),
        ("global batch", f"{batch}, accumulation {conditions['accumulation']}"),
        ("steps, seeds", f"{conditions['steps']}, {conditions['seeds']}"),
        ("single steps after steps", ", ".join(map(str, conditions["compared_after"]))),
        ("ZeRO stage, offload", f"{conditions['zero_stage']}, {conditions['offload']}"),
        ("processes", str(conditions["processes"])),
        ("hardware", text(device)),
        ("versions", ", ".join(f"{name} {versions[name]}" for name in named)),
        ("command", code(conditions["command"])),
        ("the run's own hypothesis, which these checks do not test", text(conditions["hypothesis"] or "none")),
    ]
    return Table(("", ""), rows)


def _draw_trajectories(axes: Sequence[Axes], found: dict[str, Any]) -> None:
    bounds = {check["name"]: check["bound"] for check in found["checks"]}
    runs = found["trajectories"]
    for index, (mine, other) in enumerate(zip(runs["candidate"], runs["fp32"], strict=True)):
        losses, exact = ([float(loss) for loss in run["losses"]] for run in (mine, other))
        labels = (None, None) if index else ("FP32", "this run")
        axes[0].plot(other["steps"], exact, color=_FP32, linewidth=2.4, label=labels[0])
        axes[0].plot(mine["steps"], losses, color=_MINE, linewidth=0.9, label=labels[1])
        theirs = dict(zip(other["steps"], exact, strict=True))
        pairs = [(step, loss) for step, loss in zip(mine["steps"], losses, strict=True) if step in theirs]
        gaps = [(loss - theirs[step]) / theirs[step] for step, loss in pairs]
        axes[1].plot([step for step, _ in pairs], gaps, color=_COLOURS[index % len(_COLOURS)], linewidth=0.9)
    for sign in (1, -1):
        axes[1].axhline(sign * bounds["loss_gap"], color=_BOUND, linestyle="--", linewidth=1.2)
    axes[0].set_title("Training loss (nats per token)")
    axes[0].legend(loc="upper right")
    axes[1].set_title("Relative difference of each loss from FP32's")
    axes[1].yaxis.set_major_formatter(lambda value, _: f"{value:+.1%}")
    for axis in axes:
        axis.set_xlabel("optimizer step")


def _draw_steps(axes: Sequence[Axes], found: dict[str, Any]) -> None:
    bounds = {check["name"]: check["bound"] for check in found["checks"]}
    walks = [walk for walk in found["walks"] if walk["steps"]]
    order = _modules_in_order(walks)
    panels = (
        (axes[0], "module_error", module_errors, "Output error by module"),
        (axes[1], "gradient_error", gradient_errors, "Gradient error by module"),
    )
    for axis, bound, values, title in panels:
        judged = [[s for s in walk["steps"] if s["applied"] or bound == "module_error"] for walk in walks]
        for index, (walk, steps) in enumerate(zip(walks, judged, strict=True)):
            numbers = [step["step"] for step in walk["steps"]]
            label = f"step {numbers[0]}" if len(numbers) == 1 else f"steps {numbers[0]} to {numbers[-1]}"
            _points(axis, order, worst_of(steps, values), _COLOURS[index % len(_COLOURS)], label)
        _mark_worst(axis, order, worst_of([step for steps in judged for step in steps], values))
        axis.set_title(f"{title}, worst of all steps")
        axis.set_xlabel("module, in the order of execution")
        axis.axhline(bounds[bound], color=_BOUND, linestyle="--", linewidth=1.2, label="bound")
        axis.set_yscale("symlog", linthresh=1e-5)
        axis.set_ylim(bottom=0)
        axis.legend(loc="best")


def _modules_in_order(walks: Sequence[dict[str, Any]]) -> list[str]:
    """Every compared module: those with an output in the order of execution, then those with weights only."""
    steps = [step for walk in walks for step in walk["steps"]]
    names = [name for step in steps for name in step["order"]]
    return list(dict.fromkeys([*names, *(name.rpartition(".")[0] for step in steps for name in step["parameters"])]))


def _points(axis: Axes, order: Sequence[str], errors: dict[str, float], colour: str, label: str) -> None:
    """A point for each module; a non-finite one is a cross at the upper edge."""
    places = {name: place for place, name in enumerate(order)}
    finite = {name: value for name, value in errors.items() if math.isfinite(value)}
    axis.plot([places[name] for name in finite], list(finite.values()), "o", color=colour, markersize=4, label=label)
    others = [places[name] for name in errors if name not in finite]
    if others:
        edge = axis.get_xaxis_transform()  # data along x, the height of the axes along y
        axis.plot(others, [0.98] * len(others), "X", color=colour, markersize=8, transform=edge, clip_on=False)


def _mark_worst(axis: Axes, order: Sequence[str], errors: dict[str, float]) -> None:
    if not errors:
        return
    name = max(errors, key=lambda item: errors[item])
    finite = math.isfinite(errors[name])
    if finite and not errors[name]:
        return
    where: Any = (order.index(name), errors[name] if finite else 0.98)
    left = where[0] < len(order) / 2  # the name stays within the panel
    axis.annotate(
        plain(name),
        where,
        xycoords="data" if finite else axis.get_xaxis_transform(),
        textcoords="offset points",
        xytext=(6 if left else -6, 6 if finite else -10),
        ha="left" if left else "right",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},  # may lie on the bound's line
        fontsize=9,
    )


def _value(check: dict[str, Any], which: str) -> str:
    value = float(check[which])  # "inf" and "nan" are strings in JSON
    if not math.isfinite(value):
        return "not measured" if math.isnan(value) else "not finite"
    return f"{value:.2%}" if check["name"] in _SHARES else _number(value)


def _number(value: Any) -> str:
    number = float(value)
    return f"{number:.3g}" if abs(number) < 0.01 else f"{number:.4g}"


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "not reported here"
    return f"{value / 1e9:.2f} GB" if unit == "bytes" else f"{value:,.4g} {unit}".strip()
