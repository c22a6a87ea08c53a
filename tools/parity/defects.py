"""Run the parity gate on a recipe with each planted defect, against one FP32 twin, and tabulate what it found.

    python -m tools.parity.defects [--config FILE] [--steps N] [--report DIR] [key.sub=value ...]

Exit code 0 when the sound run passes and every defect is found, named where it has a module; 3 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from config.cli import REPOSITORY, Arguments, entry_point, positive_int
from config.files import write_atomically
from config.markdown import table
from launch.job import add_processes_option
from tools.parity.gate import NO_PARITY, PARITY, gate
from tools.parity.jobs import plan, train_references

PLANTED = (
    ("{{kind: fp16_norm, module: {norm}, factor: 30000}}", "module_error"),
    ("{{kind: coarse_output, module: {linear}}}", "module_error"),
    ("{{kind: flushed_gradient, module: {linear}}}", "sign_agreement"),
    ("{{kind: lost_reduction, module: {linear}}}", "gradient_error"),
    ("{{kind: stale_weight, module: {linear}}}", "weight_drift"),
    ("{{kind: wrong_unscaling, factor: 2}}", "gradient_error"),
    ("{{kind: skipped_accumulation}}", "gradient_error"),
    ("{{kind: unclipped_update}}", "update_error"),
    ("{{kind: silent_skip}}", "update_error"),
)
"""Each defect as the config writes it, where {norm} and {linear} stand for modules of the model, and the check that has
to find it."""
HEAD = ("planted", "found by", "modules named", "validation loss against FP32")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.parity.defects", __doc__)
    parser.add_argument("--config", default=str(REPOSITORY / "config/recipes/demo.yaml"))
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--report", type=Path, default=Path("runs/parity-defects"))
    add_processes_option(parser)
    parser.add_argument("--norm", default="model.layers.1.post_attention_layernorm", help="a norm of the model")
    parser.add_argument("--linear", default="model.layers.2.mlp.down_proj", help="a linear module of the model")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    rows, as_expected = run_all(options)
    page = table(HEAD, rows)
    write_atomically(options.report / "defects.md", page.encode())
    print(page, end="")
    return PARITY if as_expected else NO_PARITY


def run_all(options: argparse.Namespace) -> tuple[list[tuple[str, ...]], bool]:
    """A row for the sound run and for each defect, and whether every result is as expected."""
    rows: list[tuple[str, ...]] = []
    references, as_expected = None, True
    for defect, caught_by in (("", ""), *PLANTED):
        text = defect.format(norm=options.norm, linear=options.linear)
        kind = text.removeprefix("{kind: ").rstrip("}").partition(",")[0] or "nothing"
        overrides = [*options.overrides, f"defects=[{text}]"]
        folder, size = options.report / kind, {"steps": options.steps, "processes": options.processes}
        chosen = plan(options.config, overrides, folder=folder, **size)
        references = references or train_references(chosen, print)
        found = gate(chosen, references=references)
        checks = {check["name"]: check for check in found["checks"]}
        named = sorted({name for check in checks.values() for name in check["modules"] if not check["passed"]})
        module = options.norm if "norm" in kind else options.linear if options.linear in text else None
        failed = [check["name"] for check in found["checks"] if not check["passed"]]
        as_expected &= caught_by in failed if defect else not failed
        as_expected &= module is None or module in checks[caught_by]["modules"]
        where = ", ".join(named) if len(named) <= 3 else f"{len(named)} and more"
        delta = float(checks["validation_delta"]["measured"])
        rows.append((kind, ", ".join(failed) or "nothing", where or "none", f"{delta:+.2%}"))
    return rows, as_expected


if __name__ == "__main__":
    sys.exit(main())
