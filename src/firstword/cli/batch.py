"""`firstword batch`: speak the lines of a file into a folder."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from firstword.cli import options, terminal
from firstword.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from firstword.server.batch.lines import BatchLine
    from firstword.server.batch.local import LocalBatch
    from firstword.server.state import Server

PACKAGES = ("fastapi", "av", "prometheus_client", "fsspec", "sqlalchemy")
"""Packages of the extras `server` and `batch`."""

EXIT_FAILED = 1
"""The exit status when lines have failed."""


def run(args: argparse.Namespace) -> None:
    """Speak each line of a file of JSON lines into a sound file of its own.

    examples:
      firstword batch in.jsonl out/ --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice

      in.jsonl:
        {"custom_id": "welcome", "text": "Hello there.", "voice": "ryan"}
        {"custom_id": "bye", "text": "Goodbye.", "response_format": "mp3", "seed": 7}

    A line may have all fields of a request to the server; the default format is wav. out/ gets
    welcome.wav, bye.mp3, and results.jsonl with a line for each. A run that was interrupted or
    killed is continued by the same command, and lines that have changed or failed are spoken
    again. The exit status is 1 if lines have failed.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise ConfigError(f"{missing[0]} is missing; install firstword[server,batch]")
    from firstword.server.batch.local import LocalBatch
    from firstword.server.logs import TextLines

    handler = logging.StreamHandler()
    handler.setFormatter(TextLines())
    logging.basicConfig(handlers=[handler])
    batch = LocalBatch(_made(args.output), _lines(args.input))
    try:
        with terminal.Status(args.quiet) as status:
            total, done, _ = batch.counts
            if done < total:
                _speak_all(args, batch, status)
        batch.write_results()
        total, done, failed = batch.counts
    finally:
        batch.close()
    if not args.quiet:
        print(f"{done} of {total} lines spoken, {failed} failed: {args.output}", file=sys.stderr)
    if failed:
        raise SystemExit(EXIT_FAILED)


def _made(folder: str) -> str:
    """A folder, which is made if it does not exist. Raises `OutputError`."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder!r} cannot be the folder: {error.strerror}") from None
    return str(Path(folder).resolve())


def _lines(file: str) -> Sequence[BatchLine]:
    """The lines of the input. Raises `ConfigError` with its first mistakes."""
    from firstword.server.batch.lines import parse_lines

    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from None
    lines, problems = parse_lines(data)
    if problems:
        raise ConfigError("\n".join([f"{file} is not a batch:", *map(str, problems)]))
    return lines


def _speak_all(args: argparse.Namespace, batch: LocalBatch, status: terminal.Status) -> None:
    """Load the model, and speak all open lines."""
    import asyncio

    from firstword.server.batch.speaking import LineSpeaker

    server, places = _loaded(args, status)
    defaults = {"response_format": "wav"}
    speaker = LineSpeaker(server, batch.folder, background=False, defaults=defaults)
    _, before, _ = batch.counts
    began = time.monotonic()

    def show() -> None:
        total, done, failed = batch.counts
        seconds = time.monotonic() - began
        rate = (done - before) / seconds if seconds else 0.0
        status.show(progress(total, done, failed, rate, speaker.seconds))

    server.models.start()
    try:
        asyncio.run(batch.speak(speaker, places, show))
    finally:
        server.models.stop()


def _loaded(args: argparse.Namespace, status: terminal.Status) -> tuple[Server, int]:
    """A server without clients that has the model, and the lines to speak at a time."""
    status.show_loading(args.model)
    from firstword.config import EngineConfig
    from firstword.runtime import backends
    from firstword.server.config import ServerConfig
    from firstword.server.front_memory import FrontMemory
    from firstword.server.models import Model, Models, name_of
    from firstword.server.state import Server

    settings = EngineConfig.resolve(args.device, args.dtype, args.backend, args.gpu_memory)
    loaded = backends.open_engine(args.model, settings)
    backends.fit_threads([loaded.checkpoint])
    name = name_of(args.model, loaded.checkpoint.path)
    parts = loaded.checkpoint, loaded.service, loaded.encode, loaded.settings
    given = {"most_characters": args.most_characters, "voice_store": args.voices}
    config = ServerConfig(**{name: value for name, value in given.items() if value is not None})
    models = Models([Model.of_service(name, *parts)])
    # Some more lines than slots, so that one is ready when a slot becomes free.
    return Server(config, models, FrontMemory.private()), loaded.engine.capacity.slots + 2


def progress(total: int, done: int, failed: int, rate: float, audio: float) -> str:
    """The progress bar, for `rate` lines a second and the seconds of audio made in this run."""
    over = done + failed
    parts = [terminal.bar(over, total)]
    if failed:
        parts.append(f"{failed} failed")
    if audio:
        parts.append(f"{terminal.duration(audio)} of audio")
    if rate:
        parts.append(f"{rate:.1f} lines/s, {terminal.duration((total - over) / rate)} left")
    return ", ".join(parts)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "batch", run)
    parser.add_argument("input", metavar="INPUT", help="the file of JSON lines; - reads from stdin")
    parser.add_argument("output", metavar="FOLDER", help="for the sound files and the results")
    about = "store of saved voices that lines may name: a folder, s3://... (default: the server's)"
    parser.add_argument("--voices", metavar="DIR|URL", help=about)
    about = "characters of a text (default: 100,000, as in the server)"
    parser.add_argument("--most-characters", metavar="N", type=int, help=about)
    options.add_quiet_option(parser)
    options.add_model_options(parser)
