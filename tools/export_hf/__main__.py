"""`python -m tools.export_hf`."""

from tools.export_hf.command import main

if __name__ == "__main__":
    raise SystemExit(main())
