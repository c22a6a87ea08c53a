"""`python -m lab.envelope`."""

from lab.envelope.command import main

if __name__ == "__main__":
    raise SystemExit(main())
