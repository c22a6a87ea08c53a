"""`python -m tracking.watch`."""

from tracking.watch.command import main

if __name__ == "__main__":
    raise SystemExit(main())
