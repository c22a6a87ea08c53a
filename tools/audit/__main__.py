"""`python -m tools.audit`."""

from tools.audit.command import main

if __name__ == "__main__":
    raise SystemExit(main())
