"""`python -m launch.doctor`."""

import sys

from launch.doctor.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
