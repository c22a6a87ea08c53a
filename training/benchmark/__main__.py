"""`python -m training.benchmark`."""

from training.benchmark.command import main

if __name__ == "__main__":
    raise SystemExit(main())
