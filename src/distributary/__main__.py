"""Lets you run the command `distributary` as `python -m distributary`."""

import sys

from distributary.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
