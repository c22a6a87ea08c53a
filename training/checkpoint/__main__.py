"""`python -m training.checkpoint`."""

import sys

from training.checkpoint.tool import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
