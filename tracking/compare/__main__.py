"""`python -m tracking.compare`."""

from __future__ import annotations

import sys

from tracking.compare.command import main

if __name__ == "__main__":
    sys.exit(main())
