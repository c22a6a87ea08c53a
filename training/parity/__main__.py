"""`python -m training.parity`."""

from __future__ import annotations

import sys

from training.parity.gate import main

if __name__ == "__main__":
    sys.exit(main())
