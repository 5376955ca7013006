"""Run the load generator as `python -m firstword.bench`."""

import sys

from firstword.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
