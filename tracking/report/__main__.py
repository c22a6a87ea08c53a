"""`python -m tracking.report`."""

from __future__ import annotations

import sys

from tracking.report.command import main

if __name__ == "__main__":
    sys.exit(main())
