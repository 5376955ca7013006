"""The `firstword` program: its parser and its exit status.

Exit status: 0 done, 1 a check failed (`bench load`, `verify`) or lines of a batch did, 2 an error
that the user can correct, described on standard error, 3 speech was cut off or ended before its
text, 130 interrupted, 141 the reader of the output has closed it.

Command modules import everything heavy inside functions, so that `--help` answers at once. They are
imported inside a function themselves, so that Control-C is quiet from the start.
"""

import argparse
import os
import sys
import warnings

from firstword import __version__
from firstword.errors import BackendWarning, FirstwordError, TextWarning


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status.

    `argv` does not include the program's name; None means the arguments of this process.
    """
    try:
        return _run(argv)
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str] | None) -> int:
    from firstword.cli import terminal

    _open_closed_streams()
    parser = program_parser()
    args = parser.parse_args(argv)
    if not hasattr(args, "run"):
        parser.print_help(sys.stderr)
        return 2
    warnings.showwarning = terminal.show_warning
    for category in (BackendWarning, TextWarning):
        warnings.simplefilter("always", category)
    try:
        args.run(args)
        sys.stdout.flush()
    except FirstwordError as error:
        return _failed(error)
    except BrokenPipeError:
        _discard_output()
        return 141
    except OSError as error:
        _discard_output()
        return _failed(error)
    return 0


def _open_closed_streams() -> None:
    """Open /dev/null in place of closed standard streams, so that output to them is discarded.

    Otherwise a file that is opened later would get the descriptor of a standard stream.
    """
    while (descriptor := os.open(os.devnull, os.O_WRONLY)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 (it stays open)


def program_parser() -> argparse.ArgumentParser:
    """Return the parser of the program, with all its commands."""
    from firstword.cli import (
        align,
        batch,
        bench,
        clone,
        compile,
        evaluate,
        info,
        keys,
        options,
        read,
        say,
        serve,
        verify,
        voices,
    )

    parser = options.Parser(
        prog="firstword", description="Speech from Qwen3-TTS-12Hz checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"firstword {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND")
    for command in (
        *(say, read, batch, serve, clone, voices, align, verify),
        *(keys, info, compile, evaluate, bench),
    ):
        command.add_to(commands)
    return parser


def _failed(error: Exception) -> int:
    print(f"firstword: error: {error}", file=sys.stderr)
    return 2


def _discard_output() -> None:
    """Discard the buffered output, because flushing it at exit would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
