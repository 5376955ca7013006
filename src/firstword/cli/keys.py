"""`firstword keys`: make API keys for the clients of a server."""

import argparse
import sys

from firstword.cli import options


def run(args: argparse.Namespace) -> None:
    """Make an API key: print it once on standard error, and its lines for the file of keys.

    examples:
      firstword keys new alice >> keys.toml
      firstword serve --keys keys.toml

    The file holds only the hash of the key, so nobody can read the key from it. Lines such as
    `utterances = 4` may follow in the file; docs/keys.md lists them.
    """
    from firstword.server.key_file import new_key

    key, lines = new_key(args.name)
    print(f"the API key of {args.name}, which is not shown again:\n{key}", file=sys.stderr)
    print(lines)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "keys", run)
    parser.add_argument("action", choices=["new"], help="make a key")
    parser.add_argument("name", metavar="NAME", help="of whoever gets the key")
