"""`python -m launch.rollouts`."""

import sys

from launch.rollouts.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
