"""`python -m training.parity`."""

from training.parity.gate import main

if __name__ == "__main__":
    raise SystemExit(main())
