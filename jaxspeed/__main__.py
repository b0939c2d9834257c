"""`python -m jaxspeed`."""

import sys

from jaxspeed.cli import main

if __name__ == "__main__":
    sys.exit(main())
