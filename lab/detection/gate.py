"""Run the parity gate on a recipe with each planted defect, against one FP32 twin, and tabulate what it found.

    python -m lab.detection.gate [--config FILE] [--steps N] [--report DIR] [key.sub=value ...]

Exit code 0 when the sound run passes and every defect is found, named where it has a module; 3 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from config.cli import DIVERGED, DONE, REPOSITORY, Arguments, entry_point
from config.files import write_atomically
from config.options import positive_int
from lab.detection.planted import MODULE
from lab.detection.plants.permanent import PLANTED
from launch.job import add_processes_option, default_processes, job_command
from tools.parity.gate import gate
from tools.parity.jobs import plan, train_references
from tracking.pages.markdown import Table

HEAD = ("planted", "found by", "modules named", "validation loss against FP32")


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m lab.detection.gate", __doc__)
    parser.add_argument("--config", default=str(REPOSITORY / "config/recipes/demo.yaml"))
    parser.add_argument("--steps", type=positive_int, default=60)
    parser.add_argument("--report", type=Path, default=Path("runs/parity-defects"))
    add_processes_option(parser)
    parser.add_argument("--norm", default="model.layers.1.post_attention_layernorm", help="a norm of the model")
    parser.add_argument("--linear", default="model.layers.2.mlp.down_proj", help="a linear module of the model")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    rows, as_expected = run_all(options)
    table = Table(HEAD, rows)
    write_atomically(options.report / "defects.md", f"{table}\n".encode())
    print(table)
    return DONE if as_expected else DIVERGED


def run_all(options: argparse.Namespace) -> tuple[list[tuple[str, ...]], bool]:
    """A row for the sound run and for each defect, and whether every result is as expected."""
    rows: list[tuple[str, ...]] = []
    references, as_expected = None, True
    processes = options.processes or default_processes()
    for defect, caught_by in (("", ""), *PLANTED):
        text = defect.format(norm=options.norm, linear=options.linear)
        kind = text.removeprefix("{kind: ").rstrip("}").partition(",")[0] or "nothing"
        launcher = job_command(["-m", MODULE, text], processes=processes) if defect else ()
        how = {"folder": options.report / kind, "steps": options.steps, "processes": processes, "launcher": launcher}
        chosen = plan(options.config, options.overrides, **how)
        if references is None:
            (chosen.folder / "parity.json").unlink(missing_ok=True)  # beside it the gate would remove the twins as old
            references = train_references(chosen)
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
