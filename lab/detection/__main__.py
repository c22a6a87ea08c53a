"""`python -m lab.detection`."""

from lab.detection.command import main

if __name__ == "__main__":
    raise SystemExit(main())
