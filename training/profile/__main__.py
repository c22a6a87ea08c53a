"""`python -m training.profile`."""

from __future__ import annotations

import sys

from training.profile.summary import main

if __name__ == "__main__":
    sys.exit(main())
