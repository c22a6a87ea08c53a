"""`python -m lab.benchmark`."""

from lab.benchmark.command import main

if __name__ == "__main__":
    raise SystemExit(main())
