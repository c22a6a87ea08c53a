"""`python -m launch.plan`."""

import sys

from launch.plan.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
