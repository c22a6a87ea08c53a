"""`python -m tools.parity`."""

from tools.parity.gate import main

if __name__ == "__main__":
    raise SystemExit(main())
