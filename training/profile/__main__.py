"""Write the .json, .md and .html of a trace, as at the end of the profiled steps.

python -m training.profile RUN/profile/step-20-21/rank-0.pt.trace.json.gz
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError
from tracking.profile.summary import write_summary


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Write the summary of a trace and print its headline and the page. Exit code 2 when there is no such trace."""
    parser = Arguments("python -m training.profile", __doc__)
    parser.add_argument("trace", type=Path, help="RUN/profile/step-A-B/rank-R.pt.trace.json.gz")
    trace = parser.parse_args(arguments).trace
    known = trace.parent / f"{trace.name.partition('.')[0]}.json"
    try:
        if not trace.is_file():
            raise UserError(f"{trace}: no such trace")
        facts: dict[str, Any] = {"steps": [0], "rank": 0, "compute": "fp32"}
        if known.is_file():
            facts = json.loads(known.read_text(encoding="utf-8"))
        headline = write_summary(trace, facts)
    except ValueError as error:
        raise UserError(str(error)) from error
    print(headline, end="\n\n")
    print(known.with_suffix(".md").read_text(encoding="utf-8"))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
