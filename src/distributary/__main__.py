"""`python -m distributary` is the command `distributary`."""

import sys

from distributary.cli import main

if __name__ == "__main__":
    sys.exit(main())
