"""The summary of a profile as Markdown."""

import re
from collections.abc import Sequence
from typing import Any

from config.printable import first_of
from tracking.numbers import percent
from tracking.pages.markdown import Table, code, page, section
from tracking.profile.matmul import BEST, GOOD, added_up, grouped

_ROWS = 15
_BLOCK = re.compile(r"(?<=\.)\d+(?=\.|$)")  # block number within a module name


def profile_page(summary: dict[str, Any], trace: str) -> str:
    """The page as Markdown. summary: from `tracking.profile.summary.summarise`. trace: file name of the trace."""
    parts = (_where, _matmuls, _fp32_matmuls, _misaligned_sizes, _casts, _how)
    title = f"# Profile of {which_steps(summary['steps'])}"
    return page(title, *_verdict(summary), _opening(summary, trace), *(part(summary) for part in parts))


def which_steps(steps: list[int]) -> str:
    """Text such as `step 6` or `steps 6 to 8`."""
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def largest_parts(summary: dict[str, Any]) -> str:
    """The three categories that took longest, with their share of the time."""
    parts = summary["device_time"]["categories"] if summary["device_time"] else summary["host"]
    total = sum(summary["steps_seconds"])
    largest = sorted(parts.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {percent(seconds / total, 2)}" for name, seconds in largest)


def _verdict(summary: dict[str, Any]) -> tuple[str, list[str]]:
    """(sentence on what took longest, points on what makes matmuls slower than necessary)."""
    points = []
    unintended = merge_blocks([row for row in summary["fp32_matmuls"] if not row["wanted"]])
    if unintended:
        points.append(f"Unintended matmuls in FP32: {_modules(unintended)}.")
    misaligned = merge_blocks([row for row in summary["misfits"] if row["multiple_of"] < GOOD])
    if misaligned:
        points.append(f"Sizes that are not multiples of {GOOD}: {_modules(misaligned)}.")
    return f"**{largest_parts(summary)}** of the time.", points


def _modules(rows: list[dict[str, Any]]) -> str:
    return first_of([row["modules"] for row in rows], 3)


def _opening(summary: dict[str, Any], trace: str) -> str:
    walls = summary["steps_seconds"]
    timing = f"A step took {_ms(sum(walls) / len(walls))} under the profiler"
    before = summary.get("unprofiled_step_seconds")
    if before:
        timing += f"; the {summary['unprofiled_steps']} before it took {_ms(before)} (median)"
    where = f"rank {summary['rank']} of {summary.get('world_size', '?')}, {summary.get('device', '?')}"
    compute = f"{summary.get('compute', '?')}{', TF32 allowed' if summary.get('tf32') else ''}"
    return (
        f"{where}, torch {summary.get('torch', '?')}, compute {compute}. {timing}. "
        f"Trace: {code(trace)}, for https://ui.perfetto.dev or TensorBoard."
    )


def _where(summary: dict[str, Any]) -> str:
    wall, steps = sum(summary["steps_seconds"]), len(summary["steps_seconds"])
    device, running = summary["device_time"], summary["communication"]["under_way"]
    recompute = summary["phases"].get("recompute")

    def shares(parts: dict[str, float]) -> Table:
        rows = [(name, _ms(seconds / steps), percent(seconds / wall, 3)) for name, seconds in parts.items()]
        return Table(("", "a step", "share"), rows)

    blocks: list[object] = []
    if device:
        busy = f"The GPU was busy {percent(device['busy_seconds'] / wall, 3)} of the time. On the training thread:"
        blocks = ["On the GPU, by the kernels' time:", shares(device["categories"]), busy]
    elif summary.get("device", "cpu") != "cpu":
        blocks = [
            "The trace holds no kernel, so this is the training thread only, which mostly waits for the GPU; the "
            "driver may not let this user profile (NVreg_RestrictProfilingToAdminUsers)."
        ]
    return section(
        "Where the time goes",
        *blocks,
        shares(summary["host"]),
        "The same time by stage of the step:",
        shares(summary["stages"]),
        f"Collectives ran for {_ms(running / steps)} a step, overlapped with other work or not." if running else "",
        f"Recomputing activations took {_ms(recompute / steps)} a step, {percent(recompute / wall, 3)}."
        if recompute
        else "",
    )


def _matmuls(summary: dict[str, Any]) -> str:
    rows, steps = summary["matmuls"], len(summary["steps_seconds"])
    if not rows:
        return ""
    by_dtype = [
        (of["dtype"], f"{of['count'] / steps:,.0f}", _ms(of["seconds"] / steps), _speed(of["flops"], of["seconds"]))
        for of in added_up(rows, "dtype")
    ]
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
    return section(
        "Matmuls",
        Table(("dtype", "a step", "time", "speed"), by_dtype),
        "Those that took longest:",
        Table(("module", "phase", "dtype", "M x K x N", "a step", "speed"), longest),
    )


def _fp32_matmuls(summary: dict[str, Any]) -> str:
    rows = sorted(merge_blocks(summary["fp32_matmuls"], "wanted"), key=lambda row: row["wanted"])
    plain = summary.get("compute") == "fp32" and not summary.get("regions")
    none = "The run computes in FP32." if plain else "None: every matmul ran in 16 bits or less."
    shown = [
        (
            row["modules"],
            "in the manifest" if row["wanted"] else "**unintended**",
            percent(row["share_of_matmul_time"], 3),
            percent(row["share_of_matmul_flops"]),
        )
        for row in rows
    ]
    return section("Matmuls in FP32", *_first(("module", "why", "of matmul time", "of matmul FLOPs"), shown) or [none])


def _misaligned_sizes(summary: dict[str, Any]) -> str:
    rows = merge_blocks(summary["misfits"], "size", "multiple_of", "next_good", "next_best")
    rows.sort(key=lambda row: row["multiple_of"] >= GOOD)
    shown = [
        (
            row["modules"],
            row["size"],
            f"**{row['multiple_of']}**" if row["multiple_of"] < GOOD else row["multiple_of"],
            f"{row['next_good']} or {row['next_best']}" if row["multiple_of"] < GOOD else row["next_best"],
            _ms(row["seconds"] / len(summary["steps_seconds"])),
        )
        for row in rows
    ]
    return section(
        "Sizes that do not suit tensor cores",
        f"Multiples of {GOOD} are needed for speed in 16 bits, of {BEST} are best.",
        *_first(("module", "size", "multiple of", "better", "its matmuls, a step"), shown)
        or [f"Every M, N and K is a multiple of {BEST}."],
    )


def _casts(summary: dict[str, Any]) -> str:
    steps = len(summary["steps_seconds"])
    shown = [
        (
            row["kind"],
            row["modules"],
            f"{row['count'] / steps:,.0f}",
            f"{row['elements'] / steps / 1e6:,.2f} M",
            _ms(row["seconds"] / steps),
        )
        for row in merge_blocks(summary["casts"], "kind")
    ]
    return section("Casts outside the optimizer", *_first(("", "module", "a step", "elements", "time"), shown))


def _how(summary: dict[str, Any]) -> str:
    covered = 1 - summary["host"].get("Python between operators", 0.0) / sum(summary["steps_seconds"])
    return section(
        "How it was counted",
        f"Every moment of the steps counts once, so that the rows add up to the whole. {percent(covered, 3)} of the "
        "training thread's time is inside an operator, a collective, the optimizer or the wait for data. The profiler "
        "itself costs most where operators are small: compare the two step times above.",
    )


def merge_blocks(rows: list[dict[str, Any]], *keys: str) -> list[dict[str, Any]]:
    """Merge rows whose modules differ only in the block number and whose `keys` are equal; longest first.

    Other numbers are summed; `modules` describes the merged modules.
    """
    named = []
    for group in grouped([row | {"pattern": _BLOCK.sub("*", row["module"])} for row in rows], "pattern", *keys):
        pattern, modules = group[0]["pattern"], {row["module"] for row in group}
        text = f"{code(pattern)} ({len(modules)})" if len(modules) > 1 else code(group[0]["module"])
        named += [row | {"modules": text if pattern else "(outside of modules)"} for row in group]
    return added_up(named, "pattern", *keys)


def _first(head: Sequence[str], rows: Sequence[Sequence[object]]) -> list[object]:
    """A table of the first rows and the number of further ones; empty without rows."""
    more = f"And {len(rows) - _ROWS} more in the .json file." if len(rows) > _ROWS else ""
    return [Table(head, rows[:_ROWS]), more] if rows else []


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def _speed(flops: float, seconds: float) -> str:
    return f"{flops / seconds / 1e12:,.3f} TFLOP/s" if seconds else "-"
