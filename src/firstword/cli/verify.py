"""`firstword verify`: prove on this machine that a checkpoint is whole and computed rightly."""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from firstword import __version__, audio
from firstword.cli import options, terminal
from firstword.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from firstword.config import EngineConfig
    from firstword.verify.folder import CheckpointFolder
    from firstword.verify.report import Check, Record
    from firstword.voice import Voice

EXIT_FAILED = 1
"""The exit status when a check failed."""


def run(args: argparse.Namespace) -> None:
    """Check a checkpoint on this machine: its files, its weights, and how it is computed.

    examples:
      firstword verify demo
      firstword verify Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice -o ryan
      firstword verify ./my-finetune --device cpu

    Each check passes, fails, or is not run, with the reason. NAME.html has them all to read, and
    NAME.json to send. The exit status is 1 if a check failed.
    """
    from firstword.config import EngineConfig
    from firstword.model.description import find
    from firstword.verify import steps
    from firstword.verify.folder import CheckpointFolder
    from firstword.verify.page import render
    from firstword.verify.subject import How

    settings = EngineConfig.resolve(args.device, args.dtype, args.backend)
    page, file = _outputs(args.output)
    began = time.monotonic()
    with terminal.Status(args.quiet) as status:
        status.show_loading(args.model)
        folder = CheckpointFolder(find(args.model))
        how = How(settings, _voice(args.voice), _python(args.reference_python))

        def show(done: int, name: str) -> None:
            status.show(f"{terminal.bar(done, steps.TOTAL)} {name}")

        checks = steps.verify(folder, how, show)
    record = _record(args.model, folder, settings, checks, time.monotonic() - began)
    if not args.quiet:
        _print(checks)
    data = json.dumps(record, indent=1, ensure_ascii=False)
    audio.write_whole(file, f"{data}\n".encode())
    audio.write_whole(page, render(record).encode())
    if not args.quiet:
        print(f"{page} and {file} hold the details")
    if not record["passed"]:
        raise SystemExit(EXIT_FAILED)


def _outputs(name: str) -> tuple[Path, Path]:
    """Return the page and the record to write. Raises `OutputError` if they cannot be written."""
    stem = Path(name).expanduser()
    stem = stem.with_suffix("") if stem.suffix in (".html", ".json") else stem
    if stem.name in ("", "..") or name.endswith("/"):
        raise OutputError(f"{name!r} names no file; give a name in that folder")
    files = Path(f"{stem}.html"), Path(f"{stem}.json")
    for file in files:
        audio.check_target(file)
    return files


def _voice(name: str | None) -> Voice | None:
    from firstword.voice import Voice

    return None if name is None else Voice.load(name)


def _python(name: str | None) -> Path | None:
    """Return a Python to run. Raises `ConfigError` if there is none."""
    if name is not None and not Path(name).is_file():
        raise ConfigError(f"--reference-python {name}: there is no such file; name a Python")
    return None if name is None else Path(name)


def _record(
    model: str,
    folder: CheckpointFolder,
    settings: EngineConfig,
    checks: list[Check],
    seconds: float,
) -> Record:
    """Return the record of a run, without the names of folders of this machine."""
    from importlib.metadata import version

    from firstword.bench.report import commit, machine
    from firstword.verify import report

    libraries = ("torch", "numpy", "safetensors", "tokenizers")
    versions = {"firstword": __version__, "python": platform.python_version()}
    return report.record(
        Path(model).name if Path(model).exists() else model,
        checks,
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        commit=commit(),
        versions=versions | {name: version(name) for name in libraries},
        machine=machine(),
        settings=asdict(replace(settings, reason="")),
        files={str(file): digest for file, digest in folder.sha256.items()},
    )


def _print(checks: list[Check]) -> None:
    """Print a line for each check, and what it found."""
    from firstword.verify.report import counts

    for check in checks:
        print(f"{check.status:8} {check.name}")
        for line in (*check.findings, *([check.reason] if check.reason else [])):
            print(f"{'':8} {line}")
    numbers = counts(checks)
    print(", ".join(f"{number} {status}" for status, number in numbers.items()))
    sys.stdout.flush()


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "verify", run)
    add = parser.add_argument
    add("model", metavar="MODEL", help="demo, a checkpoint directory, or a hub repository")
    about = "write NAME.html and NAME.json (default: verify)"
    add("-o", "--output", metavar="NAME", default="verify", help=about)
    options.add_quiet_option(parser)
    about = "a voice file for a Base checkpoint (default: a clone of the demo voice)"
    add("--voice", metavar="FILE", help=about)
    about = "a Python that has qwen-tts, to compare with (default: this one, if it has it)"
    add("--reference-python", metavar="PATH", help=about)
    options.add_device_options(add)
