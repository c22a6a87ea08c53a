"""`python -m training.matrix`."""

from training.matrix.command import main

if __name__ == "__main__":
    raise SystemExit(main())
