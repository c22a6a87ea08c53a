"""`python -m training.envelope`."""

from __future__ import annotations

import sys

from training.envelope.command import main

if __name__ == "__main__":
    sys.exit(main())
