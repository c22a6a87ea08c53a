"""launch.supervise for operators that restart a pod by its exit code alone: 1 to 127 are final, 128 and above are not.

    python -m launch.kubernetes.retryable --restarts 0 -- torchrun train.py --config my.yaml

That is the rule of a PyTorchJob with restartPolicy ExitCode. 0, 2, 3, 71 and 74 are kept; 0 also says that
run.max_minutes is up. Every other exit code, including a save on request (75), becomes 143, as if SIGTERM had killed
the job.
"""

import sys

from config.cli import DONE
from launch import supervise

TRY_AGAIN = 143


def main(arguments: list[str]) -> int:
    code = supervise.main(["--time-up-code", str(DONE), *arguments])
    return code if code in (DONE, *supervise.FINAL) else TRY_AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
