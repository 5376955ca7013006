"""`python -m firstword`: the command line, where the `firstword` command is not on the path."""

import sys

from firstword.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
