"""docs/precision-matrix.md: the table of config/deepspeed/combinations.py, with the measurements of every row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from config.deepspeed.combinations import COMPUTES, SETTINGS, STAGES, UPSTREAM, Combination, combinations, refusal
from config.markdown import table
from precision.tolerance import tolerance
from training.matrix.cells import COARSEST, ROUNDINGS, Cell

Results = dict[str, dict[str, Any]]
"""Results of `training.matrix.run.measure` by the cell's name."""

_SIGNS = {"verified": "ok", "refused": "refused", "wrong": "**WRONG**", "raised": "**RAISED**"}


def expected_verdict(cell: Cell) -> str:
    """verified or refused, by the table."""
    return "refused" if refusal(cell.combination) else "verified"


def expected_upstream(cell: Cell) -> str:
    """verified or wrong, by the table, for bare DeepSpeed in a cell of the cast path."""
    return "wrong" if any(row.covers(cell.combination, clipping=cell.clipping) for row in UPSTREAM) else "verified"


def unexpected(cells: Sequence[Cell], results: Results) -> list[str]:
    """One line for every cell whose verdict is not the table's."""
    lines = []
    for cell in cells:
        result = results[cell.name]
        found = [("", result, expected_verdict(cell))]
        if "upstream" in result:
            found.append(("bare DeepSpeed, ", result["upstream"], expected_upstream(cell)))
        for who, judged, expected in found:
            if judged["verdict"] != expected:
                lines.append(f"{who}{cell.name}: {judged['verdict']}, not {expected}: {judged['reason']}")
    return lines


def page(cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    """The whole page as Markdown. Needs a result for every cell."""
    parts = [_opening(cells, results, conditions), _summary(cells, results), _upstream_section(cells, results)]
    parts += [_path_section(path, cells, results) for path in COMPUTES]
    parts += [_settings_section(cells, results), optimizers_section(cells, results), _limits()]
    return "\n\n".join(parts) + "\n"


def _opening(cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    minutes = sum(results[cell.name]["seconds"] for cell in cells) / 60
    counts = {sign: sum(results[cell.name]["verdict"] == sign for cell in cells) for sign in _SIGNS}
    wrong = sum(results[cell.name].get("upstream", {}).get("verdict") == "wrong" for cell in cells)
    compared = sum("upstream" in results[cell.name] for cell in cells)
    bounds = ", ".join(f"{tolerance(ROUNDINGS, COARSEST[name]):.1e} in {name.upper()}" for name in COMPUTES["cast"])
    verdicts = ", ".join(f"{count} {sign}" for sign, count in counts.items() if count)
    return f"""# The precision matrix

Which combinations of precision, ZeRO stage, offload, accumulation, clipping and activation checkpointing train as FP32
does, which are refused, and where DeepSpeed alone is wrong. `make matrix` writes this page from measurements and from
[config/deepspeed/combinations.py](../config/deepspeed/combinations.py), the table by which the config refuses: do not
edit it.

{len(cells)} cells: {verdicts}. Bare DeepSpeed, compared in {compared} of them, is wrong in {wrong}.

Each cell trains a Llama of 2 layers and 20 thousand parameters, or with `parallel.expert` a
Qwen3-MoE, for {conditions["steps"]} AdamW steps on different
batches on {conditions["processes"]} processes, through the real config and engine. It is compared with **one process of
plain torch in FP32** with the whole batch at once: no DeepSpeed, none of Mantissa's engine. Labels are masked unevenly,
the learning rate changes at every step, and FP16's loss scale grows every second step. Both start from the same
weights, rounded to the cell's dtype on the cast path, where the masters start rounded too.

Errors are the largest over the steps and, in a row of several cells, over those:

| | |
|---|---|
| loss | relative error of a step's loss |
| norm | relative error of a step's gradient norm, unscaled, before clipping |
| masters | distance of the FP32 masters from the reference's after the last step, over how far the reference moved |

A cell is verified when all three are below the bound for {ROUNDINGS} roundings in a row (`precision/tolerance.py`):
{bounds}. MIXED counts as BF16.

Adam's eps is 0.01, about as large as the root of its second moment, so that updates follow the size of the gradient.
With 1e-8 they follow little more than its sign, and a halved gradient hides in rounding noise.

Measured with DeepSpeed {conditions["deepspeed"]}, torch {conditions["torch"]} and transformers
{conditions["transformers"]} on {conditions["machine"]}, in {minutes:.0f} minutes."""


def _summary(cells: Sequence[Cell], results: Results) -> str:
    """Dtype by stage: Mantissa's largest error of the masters, and bare DeepSpeed's where it is wrong."""
    rows = []
    for path, computes in COMPUTES.items():
        for compute in computes:
            row = [f"{path} {compute.upper()}"]
            for stage in STAGES:
                here = [c for c in _plain(cells) if c.combination[:3] == (path, compute, stage)]
                row.append(_summary_entry(here, results))
            rows.append(row)
    return (
        "## Summary\n\n"
        "Largest error of the masters over accumulation 1 and 4, clipping off and on, activation checkpointing none and"
        " full, and every offload of that stage. In brackets: bare DeepSpeed, where it is wrong.\n\n"
        + table(["", *(f"ZeRO-{stage}" for stage in STAGES)], rows).rstrip()
    )


def _summary_entry(cells: Sequence[Cell], results: Results) -> str:
    verdicts = sorted({results[cell.name]["verdict"] for cell in cells})
    text = " ".join(_SIGNS[verdict] for verdict in verdicts)
    masters = _largest((results[cell.name]["errors"] for cell in cells), "masters")
    text += f" {masters}" if masters else ""
    wrong = [results[cell.name]["upstream"] for cell in cells if "upstream" in results[cell.name]]
    wrong = [judged for judged in wrong if judged["verdict"] != "verified"]
    if not wrong:
        return text
    return f"{text} ({_wrong_upstream(wrong)})"


def _wrong_upstream(wrong: Sequence[dict[str, Any]]) -> str:
    """What is wrong in these results of bare DeepSpeed, in a few words."""
    if any(judged["verdict"] == "raised" for judged in wrong):
        return "raises"
    if all("norm" not in judged["errors"] for judged in wrong):
        return "no norm"
    numbers = [judged["errors"] for judged in wrong]
    return f"masters {_largest(numbers, 'masters')}, norm {_largest(numbers, 'norm')}"


def _upstream_section(cells: Sequence[Cell], results: Results) -> str:
    """The table of DeepSpeed's known errors, with the measurements."""
    rows = []
    for row in UPSTREAM:
        here = [c for c in _plain(cells) if row.covers(c.combination, clipping=c.clipping)]
        bare = [results[cell.name]["upstream"] for cell in here if "upstream" in results[cell.name]]
        clipping = {None: "", True: ", clipping on", False: ", clipping off"}[row.clipping]
        where = f"{row.path} {', '.join(row.computes).upper()}, ZeRO-{', '.join(map(str, row.stages))}{clipping}"
        masters = _largest((results[cell.name]["errors"] for cell in here), "masters")
        mine = f"refused: {row.instead}" if row.refused else f"repaired: masters {masters}"
        rows.append([where, row.problem, _wrong_upstream(bare) if bare else "not run", mine])
    return "## Wrong upstream\n\n" + table(["where", "what", "bare DeepSpeed", "Mantissa"], rows).rstrip()


def _path_section(path: str, cells: Sequence[Cell], results: Results) -> str:
    """The table of one compute path: every combination with each clipping and accumulation."""
    title = {
        "cast": "## Cast path: the module is in that dtype, ZeRO holds FP32 masters",
        "manifest": "## Manifest path: parameters are the FP32 masters, a manifest names what computes in which dtype",
    }[path]
    columns = ["", "clipping", "accumulation", "loss", "norm", "masters"]
    columns += ["upstream loss", "upstream norm", "upstream masters"] if path == "cast" else []
    note = "Errors are the larger of the two without and with activation checkpointing."
    if path == "manifest":
        note += " MIXED is `config/manifests/llama_mixed.json`: BF16 with FP16 queries and keys and an FP32 head."
    rows = []
    for combination in combinations():
        if combination.path == path:
            rows += _combination_rows(combination, _plain(cells), results)
    return f"{title}\n\n{note}\n\n{table(columns, rows).rstrip()}"


def _combination_rows(combination: Combination, cells: Sequence[Cell], results: Results) -> list[list[str]]:
    rows = []
    here = [cell for cell in cells if cell.combination == combination]
    for clipping in (False, True):
        for accumulation in sorted({cell.accumulation for cell in here}):
            corner = [c for c in here if (c.clipping, c.accumulation) == (clipping, accumulation)]
            row = [str(combination), "on" if clipping else "off", str(accumulation)]
            row += _numbers([results[cell.name] for cell in corner])
            if combination.path == "cast":
                row += _numbers([results[cell.name]["upstream"] for cell in corner])
            rows.append(row)
    return rows


def _settings_section(cells: Sequence[Cell], results: Results) -> str:
    """Every other setting: measured with its errors, or refused with the reason."""
    rows = []
    for setting in SETTINGS:
        if setting.refused:
            continue
        for compute in setting.computes:
            here = [c for c in cells if c.setting == setting and c.combination.compute == compute]
            judged = [results[cell.name] for cell in here]
            if judged:
                stages = ", ".join(str(cell.combination.stage) for cell in here)
                verdict = " ".join(sorted({_SIGNS[item["verdict"]] for item in judged}))
                rows.append([f"`{setting}`, {compute.upper()}", stages, verdict, *_numbers(judged)])
    refused = [(f"`{each}`", ", ".join(map(str, each.stages)), each.refused) for each in SETTINGS if each.refused]
    return (
        "## Other settings\n\n"
        "Each differs in this one setting from the cells above, with accumulation 4 and clipping off.\n\n"
        + table(["setting", "ZeRO", "verdict", "loss", "norm", "masters"], rows)
        + "\nRefused:\n\n"
        + table(["setting", "ZeRO", "reason"], refused).rstrip()
    )


def optimizers_section(cells: Sequence[Cell], results: Results) -> str:
    """Every other optimizer: a row for each dtype, stage and clipping."""
    rows = []
    for cell in cells:
        if cell.optimizer != "adamw":
            found, (_, compute, stage, _) = results[cell.name], cell.combination
            row = [cell.optimizer, compute.upper(), str(stage), "on" if cell.clipping else "off"]
            rows.append([*row, *_numbers([found]), f"{cell.bound:.1e}"])
    return (
        "## Other optimizers\n\n"
        "With accumulation 4, each compared with its rule in plain torch and FP64 on whole parameters"
        " (`training/matrix/rules.py`; Muon's by singular values); the model is in FP64, too, but for its norms and the"
        " softmax of the loss."
        " A rule rounds more than a gradient does, so its bound is its own.\n\n"
        + table(["optimizer", "dtype", "ZeRO", "clipping", "loss", "norm", "masters", "bound"], rows).rstrip()
    )


def _limits() -> str:
    return """## Limits

It ran on the machine named above. Without a GPU there are no streams for `overlap_comm` to race on, no pinned copies
that an offload could read too early, and no NCCL, and a GPU's kernels round differently. Run `make matrix` on the
machine you train on. The model is tiny: buckets and ZeRO-3's thresholds are small accordingly, but there are no
thousands of ranks or terms."""


def _numbers(judged: Sequence[dict[str, Any]]) -> list[str]:
    """Largest errors of loss, norm and masters; the verdict in the first cell where there are none."""
    bad = sorted({item["verdict"] for item in judged} - {"verified"})
    found = [_largest((item["errors"] for item in judged), name) for name in ("loss", "norm", "masters")]
    if not any(found):
        return [_SIGNS[bad[0]], "", ""]
    found = [text or "none" for text in found]
    return [f"**{text}**" for text in found] if bad else found


def _largest(numbers: Iterable[dict[str, float]], name: str) -> str:
    values = [item[name] for item in numbers if name in item]
    return f"{max(values):.1e}" if values else ""


def _plain(cells: Sequence[Cell]) -> list[Cell]:
    """The cells without a setting or an optimizer of their own."""
    return [cell for cell in cells if cell.plain]
