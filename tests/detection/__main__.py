"""`python -m tests.detection`."""

from tests.detection.command import main

if __name__ == "__main__":
    raise SystemExit(main())
