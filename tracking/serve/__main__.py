"""`python -m tracking.serve`."""

from tracking.serve.command import main

if __name__ == "__main__":
    raise SystemExit(main())
