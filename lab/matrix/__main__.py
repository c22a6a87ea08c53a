"""`python -m lab.matrix`."""

from lab.matrix.command import main

if __name__ == "__main__":
    raise SystemExit(main())
