"""The page about an analysis: the verdict on the proposed manifest first, how it was measured last."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.markdown import code, table, text
from tracking.pages.document import write_document


def write_page(
    out: Path,
    result: dict[str, Any],
    *,
    reason: str | None,
    verdict: Sequence[str],
    regions: Sequence[tuple[str, ...]],
) -> Path:
    """Write the page beside the manifest `out`, as OUT.analysis.md and .html; returns the former.

    reason: why the proposal is rejected; None when it is not. verdict: lines, as they are printed. regions: rows of the
    table, the first of them its head.
    """
    parity = result.get("parity")
    judged = f" `tools.parity` over {parity['steps']} steps: {text(parity['verdict'])}." if parity else ""
    outcome = f"**rejected**: {text(reason)}." if reason else f"**accepted**: written to {code(out.name)}."
    alone = "FP8" if result["limits"]["fp8"] else "BF16"
    rules = result["proposal"]["manifest"]["rules"]
    parts = [
        f"# Precision manifest for {text(Path(result['config']).name)}\n",
        f"{outcome}{judged}\n",
        "".join(f"- {text(line)}\n" for line in verdict),
        f"![exponent ranges of every region](<{out.with_suffix('.png').name}>)\n",
        "## Rules\n",
        "".join(f"- {code(rule['match'])}: {text(rule['reason'])}\n" for rule in rules) or "None: one dtype for all.\n",
        "## Regions\n",
        table(regions[0], [(code(region), *map(text, rest)) for region, *rest in regions[1:]]),
        "## How it was measured\n",
        "The gradient error is the relative distance of the gradients from FP32's on held-out batches. A region's "
        f"share of {alone}'s squared error is measured with that region alone in {alone}. docs/analyze.md has the "
        "method" + (", and docs/fp8.md says what FP8 is.\n" if result["limits"]["fp8"] else ".\n"),
        f"Config {code(result['config'])}, overrides {code(' '.join(result['overrides']) or 'none')}, "
        f"{result['steps']} FP32 steps before the measurement.\n",
    ]
    return write_document(out.with_suffix(".analysis.md"), "\n".join(parts), tone="bad" if reason else "good")
