"""`python -m training.gpu_check`."""

from training.gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
