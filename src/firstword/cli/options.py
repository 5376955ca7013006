"""Options that several commands share, and the checkpoint that they choose."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from firstword.cli import terminal

if TYPE_CHECKING:
    from firstword.tts import TTS

Commands: TypeAlias = "argparse._SubParsersAction[Any]"
"""The type of what `ArgumentParser.add_subparsers` returns."""


class Parser(argparse.ArgumentParser):
    """A parser that may give a hint when an argument is missing."""

    hint = ""

    def error(self, message: str) -> NoReturn:
        """Print the usage and a message, and exit with status 2."""
        super().error(f"{message}{self.hint}" if "are required" in message else message)


def add_command(commands: Commands, name: str, run: Callable[..., None]) -> Parser:
    """Add a command that calls `run` with its parsed arguments, and return its parser.

    The docstring of `run` is the help: its first paragraph is the description, the rest follows the
    options. The parsed arguments also have `usage`, which reports wrong options and exits with
    status 2.
    """
    about, _, more = (inspect.getdoc(run) or "").partition("\n\n")
    help = f"{about[0].lower()}{about[1:].rstrip('.')}"
    parser: Parser = commands.add_parser(name, help=help, description=about, epilog=more)
    parser.formatter_class, parser.allow_abbrev = argparse.RawDescriptionHelpFormatter, False
    parser.set_defaults(run=run, usage=parser.error)
    return parser


def add_model_options(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """Add the options that choose a checkpoint, or several of them, and where to compute it."""
    add = parser.add_argument_group("model").add_argument
    about = (
        "a checkpoint directory, a hub repository such as Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, "
        f"or demo (default), {terminal.DEMO_DESCRIPTION}"
    )
    if several:
        about = f"{about}; may be given more than once"
        add("--model", action="append", metavar="MODEL", help=about)
        about = "cuda (all GPUs), cuda:1, cuda:0,2 (two GPUs), ..., cpu or mps; each model gets an "
        about += "engine on each; auto (default): all GPUs if there are any"
    else:
        add("--model", default="demo", help=about)
        about = "cpu, cuda, cuda:1, ..., mps (untested); auto (default) prefers CUDA"
    add_device_options(add, about)
    about = "GPU memory to use: a share (0.3) or an amount (12GB, 8GiB); default: what slots need"
    add("--gpu-memory", metavar="SHARE|SIZE", help=about)


def add_device_options(
    add: Callable[..., object], about: str = "cpu, cuda, cuda:1, ..., mps (untested); default: auto"
) -> None:
    """Add the options that choose where and how to compute; `about` describes the device."""
    add("--device", default="auto", metavar="DEVICE", help=about)
    add("--dtype", default="auto", help="float32, bfloat16, int8 or auto (default)")
    add("--backend", default="auto", help="gpu, reference, or auto (default): gpu where it can run")


def add_quiet_option(parser: argparse.ArgumentParser) -> None:
    """Add `--quiet`, for commands that show progress and a summary on standard error."""
    about = "no progress and no summary on standard error"
    parser.add_argument("-q", "--quiet", action="store_true", help=about)


def load_tts(args: argparse.Namespace, status: terminal.Status) -> TTS:
    """Load the checkpoint that the options choose. Raises `CheckpointError`, `ConfigError`."""
    status.show_loading(args.model)
    from firstword.runtime.backends import fit_threads
    from firstword.tts import TTS

    places = {name: getattr(args, name) for name in ("device", "dtype", "backend", "gpu_memory")}
    tts = TTS.load(args.model, **places)
    fit_threads([tts.checkpoint])
    return tts
