"""`python -m lab.gpu_check`."""

from lab.gpu_check.command import main

if __name__ == "__main__":
    raise SystemExit(main())
