"""The page about an analysis: the verdict on the proposed manifest first, how it was measured last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tracking.pages.document import write_document
from tracking.pages.markdown import Table, code, page, section, text


def write_page(
    out: Path,
    result: dict[str, Any],
    *,
    reason: str | None,
    verdict: Sequence[str],
    regions: Table,
) -> Path:
    """Write the page beside the manifest `out`, as OUT.analysis.md and .html; returns the former.

    reason: why the proposal is rejected; None when it is not. verdict: lines, as they are printed. regions: the
    table that is printed.
    """
    parity = result.get("parity")
    judged = f" `tools.parity` over {parity['steps']} steps: {text(parity['verdict'])}." if parity else ""
    outcome = f"**rejected**: {text(reason)}." if reason else f"**accepted**: written to {code(out.name)}."
    alone = "FP8" if result["limits"]["fp8"] else "BF16"
    rules = result["proposal"]["manifest"]["rules"]
    content = page(
        f"# Precision manifest for {text(Path(result['config']).name)}",
        f"{outcome}{judged}",
        [text(line) for line in verdict],
        f"![exponent ranges of every region](<{out.with_suffix('.png').name}>)",
        section(
            "Rules",
            [f"{code(rule['match'])}: {text(rule['reason'])}" for rule in rules] or "None: one dtype for all.",
        ),
        section("Regions", Table(regions.head, [(code(cells[0]), *map(text, cells[1:])) for cells, _ in regions.rows])),
        section(
            "How it was measured",
            "The gradient error is the relative distance of the gradients from FP32's on held-out batches. A region's "
            f"share of {alone}'s squared error is measured with that region alone in {alone}. docs/analyze.md has the "
            "method" + (", and docs/fp8.md says what FP8 is." if result["limits"]["fp8"] else "."),
            f"Config {code(result['config'])}, overrides {code(' '.join(result['overrides']) or 'none')}, "
            f"{result['steps']} FP32 steps before the measurement.",
        ),
    )
    return write_document(out.with_suffix(".analysis.md"), content, tone="bad" if reason else "good")
