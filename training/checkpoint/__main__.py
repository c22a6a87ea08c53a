"""`python -m training.checkpoint`."""

from __future__ import annotations

import sys

from training.checkpoint.tool import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
