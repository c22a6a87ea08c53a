"""`python -m tools.replay`."""

from tools.replay.command import main

if __name__ == "__main__":
    raise SystemExit(main())
