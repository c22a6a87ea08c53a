"""`python -m training.envelope`."""

from training.envelope.command import main

if __name__ == "__main__":
    raise SystemExit(main())
