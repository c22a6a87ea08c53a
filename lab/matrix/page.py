"""docs/precision-matrix.md: the table of config/deepspeed/combinations.py, with the measurements of every row."""

import re
from collections.abc import Callable, Sequence
from typing import Any

from config.cli import REPOSITORY
from config.deepspeed.combinations import COMPUTES, FP8, SETTINGS, STAGES, UPSTREAM, combinations, refusal
from config.errors import UserError
from lab.matrix.cells import ACCUMULATIONS, COARSEST, ROUNDINGS, WHOLE, Cell, all_cells
from precision.tolerance import tolerance
from tracking.pages import markdown
from tracking.pages.markdown import Table, section

Results = dict[str, dict[str, Any]]
"""Results of `lab.matrix.run.measure` by cell name."""

_SIGNS = {"verified": "ok", "refused": "refused", "wrong": "**WRONG**", "raised": "**RAISED**"}


def expected_verdict(cell: Cell) -> str:
    """The verdict by the table: verified or refused."""
    return "refused" if refusal(cell.combination) else "verified"


def expected_upstream(cell: Cell) -> str:
    """The verdict on bare DeepSpeed by the table, for a cell in which it is run: verified or wrong."""
    known = any(row.covers(cell.combination, clipping=cell.clipping) for row in UPSTREAM)
    return "wrong" if known or (cell.optimizer in WHOLE and cell.combination.stage) else "verified"


def unexpected(cells: Sequence[Cell], results: Results) -> list[str]:
    """One line for every cell whose verdict differs from the table's."""
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
    return markdown.page(
        _opening(cells, results, conditions),
        _summary(cells, results),
        _upstream_section(cells, results),
        by_scripts(),
        *(_path_section(path, cells, results) for path in COMPUTES),
        *(write(cells, results, conditions) for _, write in _BY_THEMSELVES.values()),
        _limits(conditions),
    )


def updated(text: str, cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    """The page with these cells' sections inserted or replaced, the scripts' results, and the numbers at its top.

    text: the page. cells: all of one or more sections, each measured with the verdict of the table.

    Raises UserError for cells that do not make up a section that can be replaced separately.
    """
    opening, *sections = re.split(r"(?m)^(?=## )", text)
    by_title = {section.split("\n", 1)[0].removeprefix("## "): section for section in sections}
    left, every = set(cells), list(all_cells())
    for title, (belongs, write) in _BY_THEMSELVES.items():
        wanted = [cell for cell in every if belongs(cell)]
        if left.issuperset(wanted):
            minutes = sum(results[cell.name]["seconds"] for cell in wanted) / 60
            when = f"Measured by themselves on {conditions['machine']}, in {minutes:.0f} minutes."
            by_title[title] = markdown.page(write(wanted, results, conditions), when) + "\n"
            left.difference_update(wanted)
    if left:
        some = next(cell.name for cell in cells if cell in left)
        raise UserError(f"{some} is of no section that is replaced by itself, or some of that were not measured")
    bare = [expected_upstream(cell) for cell in every if cell.bare]
    counted = _counted([expected_verdict(cell) for cell in every], bare)
    opening = re.sub(r"(?m)^\d+ cells: .*$", lambda _: counted, opening, count=1)
    measured, _, _ = by_title["Wrong upstream"].partition(_BY_SCRIPTS)
    by_title["Wrong upstream"] = markdown.page(measured.rstrip(), by_scripts()) + "\n"
    last = ("FP8", "Other settings", "Other optimizers", "Limits")
    titles = sorted(by_title, key=lambda title: last.index(title) if title in last else -1)
    return opening + "".join(by_title[title] for title in titles)


def _counted(verdicts: Sequence[str], bare: Sequence[str]) -> str:
    """The number of cells by verdict, and the number in which bare DeepSpeed is wrong."""
    found = ", ".join(f"{verdicts.count(sign)} {sign}" for sign in _SIGNS if sign in verdicts)
    compared = f"Bare DeepSpeed, compared in {len(bare)} of them, is wrong in {bare.count('wrong')}."
    return f"{len(verdicts)} cells: {found}. {compared}"


def _opening(cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    minutes = sum(results[cell.name]["seconds"] for cell in cells) / 60
    judged = [results[cell.name] for cell in cells]
    counted = _counted([one["verdict"] for one in judged], [one["verdict"] for one in _bare(judged)])
    bounds = ", ".join(f"{tolerance(ROUNDINGS, COARSEST[name]):.1e} in {name.upper()}" for name in COMPUTES["cast"])
    return f"""# The precision matrix

Which combinations of precision, ZeRO stage, offload, accumulation, clipping and activation checkpointing train as FP32
does, which Mantissa refuses, and where DeepSpeed alone is wrong. `make matrix` writes this page from measurements and
from [config/deepspeed/combinations.py](../config/deepspeed/combinations.py), the table that the config check uses. Do
not edit it.

{counted}

Each cell trains a Llama of 2 layers and 20 thousand parameters (a Qwen3-MoE with `parallel.expert` or
`model.balance_loss`) for {conditions["steps"]} AdamW steps
on {conditions["processes"]} processes, through the real config and engine. The reference is **one process of plain
torch in FP32** on the whole batch at once, without DeepSpeed and without Mantissa's engine. Every step has another
batch and learning rate, labels are masked unevenly, and FP16's loss scale grows every second step. Both start from the
same FP32 weights. Bare DeepSpeed starts its masters from rounded weights on the cast path, so its reference starts from
those, too.

Each error is the largest over the steps, and over the cells where a row has several:

| | |
|---|---|
| loss | relative error of a step's loss |
| norm | relative error of a step's gradient norm, unscaled, before clipping |
| masters | distance of the FP32 masters from the reference's after the last step, over the reference's movement |

A cell is verified when all three are below the bound for {ROUNDINGS} roundings in a row (`precision/tolerance.py`):
{bounds}. MIXED counts as BF16.

Adam's eps is 0.01, about as large as the root of its second moment, so updates depend on the size of the gradient. With
1e-8 they depend on little more than its sign, and a halved gradient would not stand out from rounding.

Measured with DeepSpeed {conditions["deepspeed"]}, torch {conditions["torch"]} and transformers
{conditions["transformers"]} on {conditions["machine"]}, in {minutes:.0f} minutes."""


def _summary(cells: Sequence[Cell], results: Results) -> str:
    """Dtype by stage: Mantissa's largest error of the masters, and bare DeepSpeed's where it is wrong."""
    rows = []
    for path, computes in COMPUTES.items():
        for compute in [compute for compute in computes if compute not in FP8]:
            row = [f"{path} {compute.upper()}"]
            for stage in STAGES:
                here = [c for c in cells if c.plain and c.combination[:3] == (path, compute, stage)]
                row.append(_summary_entry(here, results))
            rows.append(row)
    return section(
        "Summary",
        "The largest error of the masters over accumulation 1 and 4, clipping off and on, activation checkpointing none"
        " and full, and every offload of that stage. Bare DeepSpeed is given in brackets where it is wrong.",
        Table(["", *(f"ZeRO-{stage}" for stage in STAGES)], rows),
    )


def _summary_entry(cells: Sequence[Cell], results: Results) -> str:
    judged = [results[cell.name] for cell in cells]
    masters, wrong = _largest(judged, "masters"), [one for one in _bare(judged) if one["verdict"] != "verified"]
    bare = f"({_wrong_upstream(wrong)})" if wrong else ""
    return " ".join(filter(None, [*_verdicts(judged), masters, bare]))


def _wrong_upstream(wrong: Sequence[dict[str, Any]]) -> str:
    """A short description of bare DeepSpeed's errors in these results."""
    if any(judged["verdict"] == "raised" for judged in wrong):
        return "raises"
    norm = _largest(wrong, "norm")
    return f"masters {_largest(wrong, 'masters')}, norm {norm}" if norm else "no norm"


def _upstream_section(cells: Sequence[Cell], results: Results) -> str:
    """The table of DeepSpeed's known errors, with the measurements."""
    rows = []
    for row in UPSTREAM:
        plain = (c for c in cells if c.plain and row.covers(c.combination, clipping=c.clipping))
        judged = [results[cell.name] for cell in plain]
        bare = _bare(judged)
        clipping = {None: "", True: ", clipping on", False: ", clipping off"}[row.clipping]
        where = f"{row.path} {', '.join(row.computes).upper()}, ZeRO-{', '.join(map(str, row.stages))}{clipping}"
        masters = _largest(judged, "masters")
        mine = f"refused: {row.instead}" if row.refused else f"repaired: masters {masters}"
        rows.append([where, row.problem, _wrong_upstream(bare) if bare else "not run", mine])
    return section("Wrong upstream", Table(["where", "what", "bare DeepSpeed", "Mantissa"], rows))


_BY_SCRIPTS = "Some features below "
"""Opening words of the part that `by_scripts` writes."""
_SCRIPTS = {
    "`optimizer.name = muon`": ("muon_zero2_drops_gradients", "muon_clipping_shrinks_update"),
    "`parallel.sequence`": ("ulysses_zero3_divides_by_sp", "ulysses_drops_mask", "ulysses_bf16_zero1_stops"),
    "`parallel.tensor`": ("autotp_dropout_replicas_part",),
    "`parallel.expert`": ("moe_zero0_clips_by_mean_norm", "autoep_transformers_5"),
    "`precision.masters = split`": ("bf16_masters_stand_still",),
    "FP8": ("fp8_cast_hides_inf", "fp8_tensorwise_depends_on_cut"),
}
"""Features that Mantissa implements differently from upstream, to docs/upstream/ scripts that measure upstream."""


def by_scripts() -> str:
    """The table of upstream's errors outside the cells, from docs/upstream/README.md."""
    text = (REPOSITORY / "docs/upstream/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"(?m)^\| (.+?) \| `(\w+)\.py`, \d \| (.+?) \| (.+?) \|", text)
    by_name = {name: (defect, expected, got) for defect, name, expected, got in listed}
    rows = [
        [where, *by_name[name], f"[{name}.py](upstream/{name}.py)"]
        for where, names in _SCRIPTS.items()
        for name in names
    ]
    return markdown.page(
        f"{_BY_SCRIPTS}have an implementation in DeepSpeed (FP8: in torch and torchao) that differs from Mantissa's. A"
        " script measures each error of those, as described in [upstream/](upstream/README.md):",
        Table(["instead of", "upstream", "expected", "got", "script"], rows),
    )


def _path_section(path: str, cells: Sequence[Cell], results: Results) -> str:
    """The table of one compute path: every combination with each clipping and accumulation."""
    title = {
        "cast": "Cast path: the module is in that dtype, ZeRO holds FP32 masters",
        "manifest": "Manifest path: parameters are the FP32 masters, a manifest names what computes in which dtype",
    }[path]
    columns = ["", "clipping", "accumulation", "loss", "norm", "masters"]
    columns += ["upstream loss", "upstream norm", "upstream masters"] if path == "cast" else []
    note = "Each error is the larger of two, without and with activation checkpointing."
    if path == "manifest":
        note += " MIXED is `config/manifests/llama_mixed.json`: BF16 with FP16 queries and keys and an FP32 head."
    rows = []
    for combination in (each for each in combinations() if each.path == path and each.compute not in FP8):
        here = [cell for cell in cells if cell.plain and cell.combination == combination]
        for clipping, accumulation in sorted({(cell.clipping, cell.accumulation) for cell in here}):
            corner = (c for c in here if (c.clipping, c.accumulation) == (clipping, accumulation))
            judged = [results[cell.name] for cell in corner]
            row = [str(combination), "on" if clipping else "off", str(accumulation), *_numbers(judged)]
            rows.append(row + (_numbers(_bare(judged)) if path == "cast" else []))
    return section(title, note, Table(columns, rows))


def fp8_section(cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    """FP8 compared with plain torch that multiplies the same FP8 operands, on one process and on all."""
    rows = []
    for combination in combinations():
        here = [cell for cell in cells if cell.fp8 and cell.combination == combination]
        for ranks in sorted({cell.ranks for cell in here}, key=lambda ranks: ranks or conditions["processes"]):
            for accumulation in ACCUMULATIONS:
                corner = [cell for cell in here if (cell.ranks, cell.accumulation) == (ranks, accumulation)]
                found = _numbers([results[cell.name] for cell in corner])
                place = [str(combination), str(ranks or conditions["processes"]), str(accumulation)]
                rows.append([*place, *found, f"{corner[0].bound:.1e}"])
    return section(
        "FP8",
        "All linear layers of the blocks compute in emulated [FP8](fp8.md). The reference, plain torch in one process,"
        " multiplies FP8 operands in these layers, made by FP8's definition in FP64 (`precision/fp8_reference.py`), and"
        " rounds nothing else below FP32. So the table does not show FP8's own error, but every other one. Where the"
        " rest is FP32, nothing may depend on ranks, stage and micro-batches, except single values that lie halfway"
        " between two FP8 numbers and round differently when sums are taken in another order. Each error is the largest"
        " without and with clipping and, on several ranks, without and with activation checkpointing.",
        Table(["", "ranks", "accumulation", "loss", "norm", "masters", "bound"], rows),
    )


def settings_section(cells: Sequence[Cell], results: Results, _conditions: dict[str, Any]) -> str:
    """Every other setting: measured, with bare DeepSpeed's errors if it has the setting, or refused with the reason."""
    rows = []
    for setting in SETTINGS:
        if setting.refused:
            continue
        for compute in setting.computes:
            here = [c for c in cells if c.setting == setting and c.combination.compute == compute]
            judged = [results[cell.name] for cell in here]
            if judged:
                stages = ", ".join(str(cell.combination.stage) for cell in here)
                row = [f"`{setting}`, {compute.upper()}", stages, " ".join(_verdicts(judged)), *_numbers(judged)]
                rows.append([*row, _bare_entry(here, results)])
    refused = [(f"`{each}`", ", ".join(map(str, each.stages)), each.refused) for each in SETTINGS if each.refused]
    return section(
        "Other settings",
        "Each row changes one setting of the cells above, with accumulation 4 and clipping off. Where bare DeepSpeed"
        " has the setting, it runs with the same JSON: the last column has ok and its error of the masters, or what is"
        " wrong, for the reasons in [these tables](#wrong-upstream).",
        Table(["setting", "ZeRO", "verdict", "loss", "norm", "masters", "bare DeepSpeed"], rows),
        "Refused:",
        Table(["setting", "ZeRO", "reason"], refused),
    )


def _bare_entry(cells: Sequence[Cell], results: Results) -> str:
    """Bare DeepSpeed's largest error of the masters where it is right, and what is wrong at the other stages."""
    run = [(cell.combination.stage, results[cell.name]["upstream"]) for cell in cells if cell.bare]
    right = _largest([judged for _, judged in run if judged["verdict"] == "verified"], "masters")
    wrong: dict[str, list[str]] = {}
    for stage, judged in run:
        if judged["verdict"] != "verified":
            wrong.setdefault(f"**{_wrong_upstream([judged])}**", []).append(str(stage))
    several = len(cells) > 1
    found = [f"{what} at ZeRO-{', '.join(stages)}" if several else what for what, stages in wrong.items()]
    return "; ".join([f"ok {right}", *found] if right else found)


def optimizers_section(cells: Sequence[Cell], results: Results, _conditions: dict[str, Any]) -> str:
    """Every other optimizer: a row for each dtype, stage and clipping."""
    columns = ["optimizer", "dtype", "ZeRO", "clipping", "loss", "norm", "masters", "bound", "bare DeepSpeed"]
    rows = []
    for cell in cells:
        if cell.optimizer != "adamw":
            found, (_, compute, stage, _) = results[cell.name], cell.combination
            row = [cell.optimizer, compute.upper(), str(stage), "on" if cell.clipping else "off"]
            rows.append([*row, *_numbers([found]), f"{cell.bound:.1e}", _bare_entry([cell], results)])
    return section(
        "Other optimizers",
        "With accumulation 4. Each optimizer is compared with its rule in plain torch and FP64 on whole parameters"
        " (`tools/parity/oracle/optimizers.py`; Muon's by singular values). The reference model is in FP64 as well,"
        " except its norms and the softmax of the loss. A rule rounds more than a gradient does, so each has"
        " its own bound.",
        "Bare DeepSpeed steps the same rule in FP32 on the tensors that it hands to an optimizer: from ZeRO-1 on, flat"
        " shards that hold many parameters. That is right for rules that treat each value by itself, and wrong for"
        " LAMB's trust ratio and StableAdamW's mean. Muon's rule needs matrices, so it cannot step on shards;"
        " DeepSpeed's own Muon was measured by [scripts](#wrong-upstream).",
        Table(columns, rows),
    )


_BY_THEMSELVES: dict[str, tuple[Callable[[Cell], bool], Callable[[Sequence[Cell], Results, dict[str, Any]], str]]] = {
    "FP8": (lambda cell: cell.fp8, fp8_section),
    "Other settings": (lambda cell: cell.setting is not None, settings_section),
    "Other optimizers": (lambda cell: cell.optimizer != "adamw", optimizers_section),
}
"""Sections that can be replaced separately: the cells of each, and the function that writes it."""


def _limits(conditions: dict[str, Any]) -> str:
    device = (
        f"Streams, pinned copies and kernels are those of {conditions['gpu']}: another GPU's may round differently,\n"
        "  and race where these do not."
        if conditions["gpu"]
        else "Without a GPU there are no streams for `overlap_comm` to race on, no pinned copies that an offload could"
        " read too\n  early, and no NCCL. A GPU's kernels also round differently."
    )
    return f"""## Limits

- {device} Run `make matrix` on the machine you train on.
- The model is tiny. Buckets and ZeRO-3's thresholds are scaled down with it, but there are no thousands of ranks, and
  no sums of thousands of terms.

Next: [scripts for each error of DeepSpeed](upstream/README.md), [which dtype is used where](numerics.md)."""


def _bare(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of bare DeepSpeed for these cells."""
    return [one["upstream"] for one in judged if "upstream" in one]


def _verdicts(judged: Sequence[dict[str, Any]]) -> list[str]:
    return sorted({_SIGNS[one["verdict"]] for one in judged})


def _numbers(judged: Sequence[dict[str, Any]]) -> list[str]:
    """Largest errors of loss, norm and masters; without any, the verdict in the first column."""
    bad = sorted({item["verdict"] for item in judged} - {"verified"})
    found = [_largest(judged, name) for name in ("loss", "norm", "masters")]
    if not any(found):
        return [_SIGNS[bad[0]], "", ""]
    found = [text or "none" for text in found]
    return [f"**{text}**" for text in found] if bad else found


def _largest(judged: Sequence[dict[str, Any]], name: str) -> str:
    values = [one["errors"][name] for one in judged if name in one["errors"]]
    return f"{max(values):.1e}" if values else ""
