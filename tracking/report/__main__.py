"""`python -m tracking.report`."""

from tracking.report.command import main

if __name__ == "__main__":
    raise SystemExit(main())
