"""`python -m launch.plan`."""

from launch.plan.command import main

if __name__ == "__main__":
    raise SystemExit(main())
