"""`python -m tracking.compare`."""

from tracking.compare.command import main

if __name__ == "__main__":
    raise SystemExit(main())
