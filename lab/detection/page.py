"""docs/detection.md, from the results of the cells."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from lab.detection.cells import STEPS, WIDE_STEPS, Cell, wide_cells
from lab.detection.defects import DEFECTS, PATHS, TEAM, Defect
from lab.detection.healthy import COUNT, SEED
from lab.detection.plants.site import BAD_RANK
from tracking.pages import markdown
from tracking.pages.markdown import Table, section

Results = dict[str, dict[str, Any]]
_TITLES = {
    "forward pass": "Forward passes",
    "gradient": "Gradients",
    "loss": "The reported loss",
    "update": "Updates",
    "loss scale": "Loss scales",
    "state": "State and resuming",
    "shared": "Mistakes that the FP32 twin shares",
    "flipped bit": "Flipped bits",
    TEAM: "The nine of `make parity-defects`",
}


def page(cells: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    """The whole page as Markdown; a cell without a result is said to be not run."""
    planted = [cell for cell in cells if cell.planted is not None]
    healthy = [cell for cell in cells if cell.planted is None]
    counted = _without_false_alarms(cells, results)
    return markdown.page(
        _opening(planted, healthy, counted, conditions),
        by_kind(cells, results),
        _false_alarms(healthy, results),
        wide_alarms(results),
        *(_group(group, planted, counted) for group in _TITLES),
        _smallest(results),
        _how(conditions),
    )


def _without_false_alarms(cells: Sequence[Cell], results: Results) -> Results:
    """The results; checks that healthy runs of the same model and precision failed do not count in planted ones."""
    known = {(cell.variant, cell.path): set[str]() for cell in cells}
    for cell in cells:
        if cell.planted is None and (result := results.get(cell.name)):
            known[cell.variant, cell.path] |= {*result["found_by"], *map(_check_of, result.get("alone", ()))}
    found = dict(results)
    for cell in cells:
        if cell.planted is not None and cell.name in results:
            others, result = known[cell.variant, cell.path], results[cell.name]
            found_by = [name for name in result["found_by"] if name not in others]
            alone = [line for line in result.get("alone", ()) if _check_of(line) not in others]
            found[cell.name] = {**result, "found_by": found_by, "alone": alone}
    return found


def _check_of(line: str) -> str:
    """The comparison that a line of a plain run is about, without module, rank and numbers; else the line."""
    said = re.search(r", step \d+: (.*) \(error ", line)
    return said[1] if said else line


def is_found(result: dict[str, Any]) -> bool:
    """Whether anything said that something is wrong."""
    return bool(result["found_by"])


def is_named(defect: Defect, result: dict[str, Any]) -> bool | None:
    """Whether the right module, and the right rank, was named; None where there is neither to name."""
    if not (defect.modules or defect.rank):
        return None
    named = [name.strip("()") for name in result["modules"]]
    module = not defect.modules or any(
        name == right or name.startswith((f"{right}.", f"{right} ", f"{right})"))  # a parameter, or what it does
        for name in named
        for right in defect.modules
    )
    return module and (not defect.rank or BAD_RANK in result["ranks"])


def _opening(planted: Sequence[Cell], healthy: Sequence[Cell], results: Results, conditions: dict[str, Any]) -> str:
    run = [cell for cell in planted if cell.name in results]
    found = [cell for cell in run if is_found(results[cell.name])]
    tried = {cell.planted for cell in run}
    missed = {cell.planted for cell in run} - {cell.planted for cell in found}
    never = [defect.name for defect in DEFECTS if defect.name in missed]
    sometimes = [
        defect.name
        for defect in DEFECTS
        if defect.name not in missed and any(not is_found(results[c.name]) for c in run if c.planted == defect.name)
    ]
    named = [
        verdict
        for cell in found
        if cell.defect is not None and (verdict := is_named(cell.defect, results[cell.name])) is not None
    ]
    done = [cell for cell in healthy if cell.name in results]
    alarms = sum(is_found(results[cell.name]) for cell in done)
    left = len(planted) - len(run)
    lines = [
        "# Which defects the checks find",
        f"""Which of {len(DEFECTS)} planted defects Mantissa's checks find, by which check, and how often a healthy
run is blamed. `make detection` plants each defect into small runs and records what the checks report: the parity
gate ([parity.md](parity.md)), the oracle that recomputes steps outside of the engine, and the checks for silent
corruption ([corruption.md](corruption.md)).

The defects live in `lab/detection/`; no check knows about them. `lab.detection.gate` also plants the nine at the
end. The command writes this page, so edit `lab/detection/page.py` instead. More defects, tried after this list
was finished, are in [detection_later.md](detection_later.md).""",
        f"""**{len(tried)} of {len(DEFECTS)} defects were planted, in {len(run)} runs;
{len(tried) - len(missed)} were found, in {len(found)} runs. A defect in one module or on one rank was named in
{sum(named)} of {len(named)} runs. {alarms} of {len(done)} healthy runs raised an alarm.**""",
        f"Not found: {', '.join(never) or 'none'}."
        + (f" Found in some of their runs only: {', '.join(sometimes)}." if sometimes else ""),
    ]
    if left:
        lines.append(f"{left} of the {len(planted)} runs with a defect have not been made yet (`-` in the tables).")
    return markdown.page(*lines)


def by_kind(cells: Sequence[Cell], results: Results) -> str:
    """The section on who found what: of each kind a plain run, the gate, the oracle; and of healthy runs."""
    done = [cell for cell in cells if cell.name in results and not cell.is_wide]
    results = _without_false_alarms(cells, results)
    kinds = dict.fromkeys(cell.defect.group if cell.defect else "" for cell in done)
    planted, rows = [cell for cell in done if cell.defect], list[tuple[object, ...]]()
    for kind in kinds:
        own = [cell for cell in done if (cell.defect.group if cell.defect else "") == kind]
        rows.append((_TITLES.get(kind, kind) if kind else "healthy runs", len(own), *_who(own, results)))
    rows.sort(key=lambda row: row[0] == "healthy runs")
    if planted:
        shares = (_share_of(count, len(planted)) for count in _who(planted, results))
        rows.insert(len(rows) - ("" in kinds), ("all planted", len(planted), *shares))
    return section(
        "Who found what",
        """A run that is not judged has the checks of every run alone ([self-check.md](self-check.md)); with a defect of
its state it is resumed halfway. The gate compares one random step, where it takes two or three points by default, and
recomputes evaluations, and of a mistake that its FP32 twin shares steps of the twin. The oracle (`--oracle`) recomputes
first steps of the run. Shares have 95% intervals (Wilson).""",
        Table(("kind", "runs", "plain run", "gate", "oracle", "gate or oracle", "any"), rows),
    )


def _who(cells: Sequence[Cell], results: Results) -> tuple[int, int, int, int, int]:
    """Numbers of runs in which a plain run, the gate, the oracle, one of the last two, and any of them found."""
    found = [results[cell.name] for cell in cells]
    alone = [bool(each.get("alone")) for each in found]
    oracle = [any(name.startswith("oracle: ") for name in each["found_by"]) for each in found]
    gate = [any(not name.startswith("oracle: ") for name in each["found_by"]) for each in found]
    either = [is_found(each) for each in found]
    return sum(alone), sum(gate), sum(oracle), sum(either), sum(map(max, alone, either))


def _share_of(count: int, total: int) -> str:
    low, high = _interval(count, total)
    return f"{count}: {count / total:.0%} ({low:.0%} to {high:.0%})"


def _false_alarms(healthy: Sequence[Cell], results: Results) -> str:
    done = [cell for cell in healthy if cell.name in results]
    alarms = [cell for cell in done if is_found(results[cell.name])]
    counts = Counter((cell.variant, cell.path) for cell in done)
    wrong = Counter((cell.variant, cell.path) for cell in alarms)
    variants = list(dict.fromkeys(cell.variant for cell in healthy))
    rows = [
        (variant, *(f"{wrong[variant, path]} of {counts[variant, path]}" for path in PATHS)) for variant in variants
    ]
    bound = f" So the rate is at most {1 - 0.05 ** (1 / len(done)):.1%} at 95% confidence." if done else ""
    return section(
        "False alarms",
        f"{len(alarms)} in {len(done)} healthy runs. All checks judged them; the checks for silent corruption "
        "were on in the plain runs of the last seed." + (bound if not alarms else ""),
        """Two bounds were widened because of these runs, so for those checks the runs are no independent evidence:
the oracle's bound on the loss in 16 bits, which two of the first 31 runs exceeded (BF16, the worse by a factor of 1.6),
and FP32's bound on gradients of attention, which one run exceeded (FP16, by a factor of 1.1).""",
        Table(("runs", *(path.upper() for path in PATHS)), rows),
        [f"{cell.name}: {'; '.join(results[cell.name]['said'])}" for cell in alarms],
    )


def wide_alarms(results: Results) -> str:
    """The section on the healthy set-ups over all architectures; empty where none has a result."""
    cells = [cell for cell in wide_cells() if cell.name in results]
    if not cells:
        return ""
    alarms = [cell for cell in cells if is_found(results[cell.name])]
    chaotic = sum(bool(results[cell.name].get("chaotic")) for cell in cells)
    low, high = _interval(len(alarms), len(cells))
    counts = Counter(_architecture(cell) for cell in cells)
    wrong = Counter(map(_architecture, alarms))
    rows = [(name, count, wrong[name]) for name, count in counts.items()]
    return section(
        "False alarms over all architectures",
        f"{len(alarms)} of {len(cells)} healthy set-ups raised an alarm: {len(alarms) / len(cells):.1%}, 95% interval "
        f"{low:.1%} to {high:.1%} (Wilson). {chaotic} whole runs were too chaotic at their learning rate to be judged. "
        f"{COUNT - len(cells)} of the {COUNT} set-ups have not run yet.",
        f"""{COUNT} set-ups are drawn (`lab/detection/healthy.py`, seed {SEED}): every architecture of
[models.md](models.md), 2 to 48 layers of width 32, learning rates from 1e-6 to 3e-2, BF16, FP16 or a manifest, ZeRO-1
to 3, {WIDE_STEPS} steps on two processes. All checks of the gate judge each of them, including those outside of the
engine. No bound or check was changed for them. `python -m lab.detection --wide` runs them, and `make detection` runs
them with the rest. What raised alarms: [details](detection_later.md#sound-runs-over-all-architectures).""",
        Table(("architecture", "set-ups", "alarms"), rows),
        [f"{cell.name}: {'; '.join(results[cell.name]['said'])}" for cell in alarms],
    )


def _architecture(cell: Cell) -> str:
    return cell.variant.split()[1].rstrip(",")


def _interval(count: int, total: int) -> tuple[float, float]:
    """Interval of a share at 95% (Wilson 1927)."""
    z, share = 1.96, count / total
    middle, half = share + z * z / (2 * total), z * math.sqrt(share * (1 - share) / total + (z / (2 * total)) ** 2)
    return max(0.0, (middle - half) / (1 + z * z / total)), (middle + half) / (1 + z * z / total)


def _group(group: str, planted: Sequence[Cell], results: Results) -> str:
    rows = []
    for defect in (defect for defect in DEFECTS if defect.group == group):
        own = {cell.path: cell for cell in planted if cell.planted == defect.name}
        done = [results[cell.name] for cell in own.values() if cell.name in results]
        by = list(dict.fromkeys(f"`{name}`" if ":" not in name else name for each in done for name in each["found_by"]))
        rows.append(
            (
                defect.name,
                *(_place(own.get(path), results) for path in PATHS),
                ", ".join(by) or ("nothing" if done else ""),
                _named(defect, done),
            )
        )
    head = ("planted", *(path.upper() for path in PATHS), "found by", "named")
    return section(_TITLES[group], Table(head, rows))


def _place(cell: Cell | None, results: Results) -> str:
    if cell is None:
        return ""
    if cell.name not in results:
        return "-"
    return f"ZeRO-{cell.stage}: " + ("found" if is_found(results[cell.name]) else "**not found**")


def _named(defect: Defect, done: Iterable[dict[str, Any]]) -> str:
    verdicts = [is_named(defect, result) for result in done if is_found(result)]
    known = [verdict for verdict in verdicts if verdict is not None]
    if not known:
        return ""
    return "yes" if all(known) else f"{sum(known)} of {len(known)}"


def _smallest(results: Results) -> str:
    rows = []
    scalable = [defect for defect in DEFECTS if defect.unit]
    if not any(f"smallest {defect.name}" in results for defect in scalable):
        return ""
    for defect in scalable:
        result = results.get(f"smallest {defect.name}")
        if result is None:
            rows.append((defect.name, "not searched", "", ""))
            continue
        found, least = result["smallest"], result["not_found"]
        unit = "position {:.0f}" if defect.unit == "bit" else "{:.1e} " + f"({defect.unit})"
        rows.append(
            (
                defect.name,
                unit.format(found["size"]) if found else "none",
                unit.format(least) if least is not None else "",
                ", ".join(f"`{name}`" for name in found["found_by"]) if found else "",
            )
        )
    return section(
        "The smallest that is found",
        """The smallest size of each defect that a check still finds. The size is halved until nothing finds it, in
BF16 at ZeRO-2, using only the first two steps' comparison with FP32 (128 tokens per rank and micro-batch). For a
flipped bit it is the lowest bit position, in a whole run. A size that rounds to nothing in BF16 cannot be found.""",
        Table(("planted", "smallest found", "not found", "found by"), rows),
    )


def _how(conditions: dict[str, Any]) -> str:
    healthy = Cell(None, "bf16", 2)
    recomputed = healthy.every
    minutes = conditions["minutes"]
    return f"""## How it is measured

- **The runs.** A Llama of 2 layers of width 64 (4 heads, 2 of keys) on 64 tokens, global batch 8 in micro-batches
  of 2, {STEPS} steps, two gloo processes. Variants: `documents` has packed documents that are kept apart, and
  uneven numbers of labels; `tied` shares one matrix between embedding and head; `dropout` is a GPT-2 with dropout
  0.1 (under a manifest its attention is in FP32, because a CPU kernel widens to it); `qwen3` and `gemma3` are these
  families.
- **What runs** is the code of `train.py` and `tools.parity`: session, build, train, restore, single steps, the
  gate's checks with their default bounds. The processes stay up between runs. Single steps are compared after one
  that is drawn for each defect, restored from its checkpoint, and in healthy runs at the start as well. The oracle
  recomputes the first {recomputed} steps.
- **The checks for silent corruption** are on where a bit flips and in nine healthy runs: slices of the update as
  long as a rank's part, every fourth step executed again, copies compared once in four steps, where a bit flips in
  each.
- **Planting.** A defect patches the built engine, or a name in a module, in the run only; *both* means in its FP32
  twin as well. FP16 starts at a scale of 1,024 that grows after 4 steps, or at 262,144 where steps are to be
  skipped.
- **Precision and stage.** Each defect has one run in BF16, one in FP16 and one under a BF16 manifest, each at a
  different one of ZeRO 1, 2 and 3. The pairing rotates from defect to defect, so every stage sees every kind of
  defect. One FP32 twin at ZeRO-2 serves all runs of a seed and model. ZeRO-3 partitions everything except the
  norms.
- **What counts as found.** A check that also failed in a healthy run of the same model and precision does not
  count. *Named*: a check that failed names the module, and for a flipped bit the rank. *Refused*: the run ended
  itself.
- **Running part of it.** `python -m lab.detection --only TEXT` selects runs, `--jobs N` runs N of them side by
  side. Results are kept in `runs/detection/results.jsonl`; results and FP32 twins of the same code are reused.

Measured at commit {conditions["commit"]} with torch {conditions["torch"]}, DeepSpeed {conditions["deepspeed"]} and
transformers {conditions["transformers"]} on {conditions["machine"]}: {minutes:.0f} minutes, one run after the
other.

Next: [the defects tried later](detection_later.md), [what the parity gate compares](parity.md)."""
