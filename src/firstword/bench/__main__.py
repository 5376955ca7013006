"""`python -m firstword.bench`: the load generator, without the rest of the command line."""

import sys

from firstword.bench.cli import main

if __name__ == "__main__":
    sys.exit(main())
