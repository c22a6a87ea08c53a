"""`python -m tools.analyze`."""

from tools.analyze.command import main

if __name__ == "__main__":
    raise SystemExit(main())
