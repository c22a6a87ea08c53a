"""`python -m training.benchmark`."""

from __future__ import annotations

import sys

from training.benchmark.command import main

if __name__ == "__main__":
    sys.exit(main())
