"""`python -m training.analyze`."""

from __future__ import annotations

import sys

from training.analyze.command import main

if __name__ == "__main__":
    sys.exit(main())
