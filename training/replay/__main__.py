"""`python -m training.replay`."""

from training.replay.command import main

if __name__ == "__main__":
    raise SystemExit(main())
