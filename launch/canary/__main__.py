"""`python -m launch.canary`."""

from launch.canary.command import main

if __name__ == "__main__":
    raise SystemExit(main())
