"""The summary of a profile as Markdown."""

from __future__ import annotations

import re
from typing import Any

from config.markdown import code, table
from training.profile.matmul import BEST, GOOD

_ROWS = 15
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.|$)")  # the number of a block in a module's name


def page(summary: dict[str, Any], trace: str) -> str:
    """The page. summary: from `training.profile.summary.summarise`. trace: name of the trace's file."""
    parts = (_where, _matmuls, _fp32_matmuls, _misaligned_sizes, _casts, _how)
    return "\n".join(filter(None, [_opening(summary, trace), *(part(summary) for part in parts)]))


def which_steps(steps: list[int]) -> str:
    """step 6, or steps 6 to 8."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def largest_parts(summary: dict[str, Any]) -> str:
    """The three categories that took longest, with their shares of the time."""
    parts = summary["device_time"]["categories"] if summary["device_time"] else summary["host"]
    total = sum(summary["steps_seconds"])
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {seconds / total:.0%}" for name, seconds in largest)


def _verdict(summary: dict[str, Any]) -> str:
    """What took longest, and what makes matmuls slower than they have to be."""
    lines = [f"**{largest_parts(summary)}** of the time.\n"]
    unintended = merge_blocks([row for row in summary["fp32_matmuls"] if not row["wanted"]])
    if unintended:
        lines.append(f"- Unintended matmuls in FP32: {_modules(unintended)}.")
    misaligned = merge_blocks([row for row in summary["misfits"] if row["multiple_of"] < GOOD])
    if misaligned:
        lines.append(f"- Sizes that are no multiple of {GOOD}: {_modules(misaligned)}.")
    return "\n".join(lines)


def _modules(rows: list[dict[str, Any]]) -> str:
    more = f" and {len(rows) - 3} more" if len(rows) > 3 else ""
    return ", ".join(row["modules"] for row in rows[:3]) + more


def _opening(summary: dict[str, Any], trace: str) -> str:
    walls = summary["steps_seconds"]
    mean = sum(walls) / len(walls)
    timing = f"A step took {_ms(mean)} under the profiler"
    before = summary.get("unprofiled_step_seconds")
    if before:
        timing += f"; the {summary['unprofiled_steps']} before it took {_ms(before)} (median)"
    where = f"rank {summary['rank']} of {summary.get('world_size', '?')}, {summary.get('device', '?')}"
    compute = f"{summary.get('compute', '?')}{', TF32 allowed' if summary.get('tf32') else ''}"
    return (
        f"# Profile of {which_steps(summary['steps'])}\n\n{_verdict(summary)}\n\n{where}, "
        f"torch {summary.get('torch', '?')}, compute {compute}. {timing}. "
        f"Trace: {code(trace)}, for https://ui.perfetto.dev or TensorBoard.\n"
    )


def _where(summary: dict[str, Any]) -> str:
    wall = sum(summary["steps_seconds"])
    steps = len(summary["steps_seconds"])
    text = "## Where the time goes\n\n"
    device = summary["device_time"]
    if device:
        text += "On the GPU, by the kernels' time:\n\n" + _shares(device["categories"], wall, steps)
        text += f"\nThe GPU was busy {device['busy_seconds'] / wall:.1%} of the time. On the training thread:\n\n"
    elif summary.get("device", "cpu") != "cpu":
        text += "The trace holds no kernel, so this is the training thread only, which mostly waits for the GPU; the "
        text += "driver may not let this user profile (NVreg_RestrictProfilingToAdminUsers).\n\n"
    text += _shares(summary["host"], wall, steps)
    text += "\nThe same time by stage of the step:\n\n" + _shares(summary["stages"], wall, steps)
    running = summary["communication"]["under_way"]
    if running:
        text += f"\nCollectives ran for {_ms(running / steps)} a step, overlapped with other work or not.\n"
    recompute = summary["phases"].get("recompute")
    if recompute:
        text += f"\nRecomputing activations took {_ms(recompute / steps)} a step, {recompute / wall:.1%}.\n"
    return text


def _shares(parts: dict[str, float], wall: float, steps: int) -> str:
    rows = [(name, _ms(seconds / steps), f"{seconds / wall:.1%}") for name, seconds in parts.items()]
    return table(("", "a step", "share"), rows)


def _matmuls(summary: dict[str, Any]) -> str:
    rows = summary["matmuls"]
    if not rows:
        return ""
    steps = len(summary["steps_seconds"])
    text = "## Matmuls\n\n"
    dtypes: dict[str, list[float]] = {}
    for row in rows:
        total = dtypes.setdefault(row["dtype"], [0.0, 0.0, 0.0])
        total[0] += row["count"]
        total[1] += row["seconds"]
        total[2] += row["flops"]
    by_dtype = [
        (dtype, f"{count / steps:,.0f}", _ms(seconds / steps), _speed(flops, seconds))
        for dtype, (count, seconds, flops) in sorted(dtypes.items(), key=lambda item: -item[1][1])
    ]
    text += table(("dtype", "a step", "time", "speed"), by_dtype)
    longest = [
        (
            row["modules"],
            row["phase"] or "-",
            row["dtype"],
            f"{str(row['batch']) + ' x ' if row['batch'] > 1 else ''}{row['m']} x {row['k']} x {row['n']}",
            _ms(row["seconds"] / steps),
            _speed(row["flops"], row["seconds"]),
        )
        for row in merge_blocks(rows, "phase", "dtype", "batch", "m", "n", "k")[:_ROWS]
    ]
    heads = ("module", "phase", "dtype", "M x K x N", "a step", "speed")
    return f"{text}\nThose that took longest:\n\n{table(heads, longest)}"


def _fp32_matmuls(summary: dict[str, Any]) -> str:
    rows = sorted(merge_blocks(summary["fp32_matmuls"], "wanted"), key=lambda row: row["wanted"])
    text = "## Matmuls in FP32\n\n"
    if not rows:
        plain = summary.get("compute") == "fp32" and not summary.get("regions")
        return text + ("The run computes in FP32.\n" if plain else "None: every matmul ran in 16 bits or less.\n")
    shown = [
        (
            row["modules"],
            "in the manifest" if row["wanted"] else "**unintended**",
            f"{row['share_of_matmul_time']:.1%}",
            f"{row['share_of_matmul_flops']:.2%}",
        )
        for row in rows[:_ROWS]
    ]
    return text + table(("module", "why", "of matmul time", "of matmul FLOPs"), shown) + _more(len(rows))


def _misaligned_sizes(summary: dict[str, Any]) -> str:
    rows = merge_blocks(summary["misfits"], "size", "multiple_of", "next_good", "next_best")
    rows.sort(key=lambda row: row["multiple_of"] >= GOOD)
    text = f"## Sizes that do not suit tensor cores\n\nMultiples of {GOOD} are needed for speed in 16 bits, of {BEST} "
    text += "are best.\n\n"
    if not rows:
        return text + f"Every M, N and K is a multiple of {BEST}.\n"
    shown = [
        (
            row["modules"],
            row["size"],
            f"**{row['multiple_of']}**" if row["multiple_of"] < GOOD else row["multiple_of"],
            f"{row['next_good']} or {row['next_best']}" if row["multiple_of"] < GOOD else row["next_best"],
            _ms(row["seconds"] / len(summary["steps_seconds"])),
        )
        for row in rows[:_ROWS]
    ]
    return text + table(("module", "size", "multiple of", "better", "its matmuls, a step"), shown) + _more(len(rows))


def _casts(summary: dict[str, Any]) -> str:
    rows = merge_blocks(summary["casts"], "kind")
    if not rows:
        return ""
    steps = len(summary["steps_seconds"])
    shown = [
        (
            row["kind"],
            row["modules"],
            f"{row['count'] / steps:,.0f}",
            f"{row['elements'] / steps / 1e6:,.2f} M",
            _ms(row["seconds"] / steps),
        )
        for row in rows[:_ROWS]
    ]
    text = "## Casts outside the optimizer\n\n"
    return text + table(("", "module", "a step", "elements", "time"), shown) + _more(len(rows))


def _how(summary: dict[str, Any]) -> str:
    covered = 1 - summary["host"].get("Python between operators", 0.0) / sum(summary["steps_seconds"])
    return (
        "## How it was counted\n\nEvery moment of the steps counts once, so that the rows add up to the whole. "
        f"{covered:.1%} of the training thread's time is inside an operator, a collective, the optimizer or the wait "
        "for data. The profiler itself costs most where operators are small: compare the two step times above.\n"
    )


def merge_blocks(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Merge rows that differ only in the block numbers of their modules, and not in `keys`; longest first.

    Numbers are summed; `modules` names the modules.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        pattern = _BLOCK.sub("*", row["module"])
        groups.setdefault((pattern, *(row[key] for key in keys)), []).append(row)
    found = []
    for (pattern, *_), group in groups.items():
        first, modules = group[0], {row["module"] for row in group}
        counted = [name for name, value in first.items() if name not in keys and isinstance(value, int | float)]
        text = f"{code(pattern)} ({len(modules)})" if len(modules) > 1 else code(first["module"])
        sums = {name: sum(row[name] for row in group) for name in counted}
        found.append({**first, **sums, "modules": text if first["module"] else "(outside of modules)"})
    return sorted(found, key=lambda row: -row["seconds"])


def _more(rows: int) -> str:
    return f"\nAnd {rows - _ROWS} more in the .json file.\n" if rows > _ROWS else ""


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _speed(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:,.3f} TFLOP/s" if seconds else "-"
