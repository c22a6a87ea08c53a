"""`python -m launch.plan`."""

from __future__ import annotations

import sys

from launch.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
