"""`python -m training.analyze`."""

from training.analyze.command import main

if __name__ == "__main__":
    raise SystemExit(main())
