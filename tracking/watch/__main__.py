"""`python -m tracking.watch`."""

from __future__ import annotations

import sys

from tracking.watch.command import main

if __name__ == "__main__":
    sys.exit(main())
