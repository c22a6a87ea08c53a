"""`python -m training.export_hf`."""

from training.export_hf.command import main

if __name__ == "__main__":
    raise SystemExit(main())
