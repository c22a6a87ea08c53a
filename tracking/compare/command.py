"""Compare runs: `python -m tracking.compare RUN RUN [RUN ...]`; the first is the baseline.

Shows differences, where and why runs first diverge, and which is better. A RUN is a run folder (finished, crashed or
still running), a glob of them, or wandb:entity/project/run. A single run is shown without a comparison.
"""

import sys
from pathlib import Path

from config.cli import DIVERGED, Arguments, entry_point
from config.errors import UserError
from tracking.compare.divergence import Tolerance
from tracking.compare.result import compare
from tracking.compare.sources import read_runs
from tracking.compare.text import scatter_table, show
from tracking.jsonl import encode
from tracking.report.files import write_page
from tracking.terminal import console

_COLUMNS = 120


@entry_point(closed_pipe=0)
def main(arguments: list[str] | None = None) -> int:
    """Compare and print; returns 0, 2 if a run cannot be read, or 3 if a run exceeds a given tolerance."""
    parser = Arguments("python -m tracking.compare", __doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="runs/demo, 'runs/*' or wandb:entity/project/run")
    parser.add_argument(
        "--tolerance",
        type=float,
        metavar="SHARE",
        help="allowed relative difference of losses, 0.01 for 1 %% (the default); when given, a run beyond it gives "
        "exit code 3",
    )
    parser.add_argument("--absolute", type=float, metavar="GAP", help="difference of losses that is always allowed")
    parser.add_argument("--price", type=float, metavar="MONEY", help="price of one device for one hour, for costs")
    parser.add_argument(
        "--by", metavar="SETTING", help="also print --measure of each run, in the order of this setting"
    )
    parser.add_argument(
        "--measure", default="loss_at_equal_tokens", help="for --by; --json has their keys (loss_at_equal_tokens)"
    )
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write one interactive page, readable offline")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    options = parser.parse_args(arguments)
    tolerance = Tolerance(
        relative=Tolerance.relative if options.tolerance is None else options.tolerance,
        absolute=options.absolute or 0.0,
    )
    gated = options.tolerance is not None or options.absolute is not None
    runs = read_runs(options.runs)
    if gated and len(runs) < 2:
        raise UserError(f"--tolerance needs two runs or more, and only {runs[0].source} was given; give another one")
    comparison = compare(runs, tolerance=tolerance, price=options.price)
    scatter = scatter_table(comparison, options.by, options.measure) if options.by else None
    if options.html is not None:
        from tracking.compare.html import page  # imports Jinja2

        write_page(options.html, page(comparison))
    if options.json:
        sys.stdout.write(encode(comparison.as_dict()).decode())
    else:
        show(comparison, console(columns=_COLUMNS))
        if scatter is not None:
            print()
            console(columns=_COLUMNS).print(scatter.grid(boxed=False))
    if options.html is not None:
        print(options.html, file=sys.stderr if options.json else sys.stdout)
    return DIVERGED if gated and not comparison.within_tolerance else 0
