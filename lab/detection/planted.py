"""Run a program of Mantissa with a defect planted into the engine that it builds: the launcher of a job that has it.

    python -m lab.detection.planted '{kind: coarse_half, module: lm_head, from_step: 18}' train.py --config FILE ...
    torchrun --nproc-per-node 2 -m lab.detection.planted '{kind: silent_skip}' -m tools.parity.steps RUN ...

The FP32 twins of the parity gate stay sound. Kinds are in lab/detection/plants/permanent.py.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence

from config.cli import entry_point
from config.errors import UserError
from config.resolved import Resolved
from lab.detection.plants.permanent import permanent
from lab.detection.plants.site import planted
from tools.parity.jobs import TWIN

MODULE = "lab.detection.planted"


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program that follows the defect as `python` would; its exit code is this one's."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    if len(given) < 2 or given[1:] == ["-m"]:
        raise UserError(f"python -m {MODULE} takes a defect, and a program of Mantissa with its arguments")
    text, *program = given
    with planted(permanent(text), rank=int(os.environ.get("RANK", "0")), wanted=is_no_twin):
        if program[0] == "-m":
            sys.argv = program[1:]
            runpy.run_module(program[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = program
            runpy.run_path(program[0], run_name="__main__")
    return 0


def is_no_twin(resolved: Resolved) -> bool:
    """Whether this is not the gate's run in FP32, by its name."""
    return not resolved.config.run.name.startswith(TWIN)


if __name__ == "__main__":
    raise SystemExit(main())
