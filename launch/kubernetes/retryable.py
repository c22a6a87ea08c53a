"""launch.supervise for operators that start a pod again by its exit code alone: 1 to 127 final, from 128 on not.

    python -m launch.kubernetes.retryable --restarts 0 -- torchrun train.py --config my.yaml

A PyTorchJob with restartPolicy ExitCode judges so. 0, 2, 3 and 74 stay what they are; every other end, a save on
request (75) among them, becomes 143, as if SIGTERM had killed it.
"""

from __future__ import annotations

import sys

from config.cli import CONFIG_ERROR, DIVERGED, DONE, UNSAVED
from launch import supervise

FINAL = (DONE, CONFIG_ERROR, DIVERGED, UNSAVED)
TRY_AGAIN = 143


def main(arguments: list[str]) -> int:
    """Supervise the command behind `--`; returns the exit code."""
    code = supervise.main(arguments)
    return code if code in FINAL else TRY_AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
