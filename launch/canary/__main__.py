"""`python -m launch.canary`."""

import sys

from launch.canary.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
