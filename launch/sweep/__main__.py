"""`python -m launch.sweep`."""

import sys

from launch.sweep.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
