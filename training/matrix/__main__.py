"""`python -m training.matrix`."""

from __future__ import annotations

import sys

from training.matrix.command import main

if __name__ == "__main__":
    sys.exit(main())
