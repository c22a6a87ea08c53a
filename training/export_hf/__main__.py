"""`python -m training.export_hf`."""

from __future__ import annotations

import sys

from training.export_hf.command import main

if __name__ == "__main__":
    sys.exit(main())
