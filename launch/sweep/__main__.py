"""`python -m launch.sweep`."""

from __future__ import annotations

import sys

from launch.sweep.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
