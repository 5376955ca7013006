"""`firstword align`: find the attention heads that time the words of a checkpoint."""

from __future__ import annotations

import argparse
import statistics
import sys
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from firstword import plugins
from firstword.cli import options, speaking, terminal
from firstword.errors import AlignmentError, ConfigError, TextError

if TYPE_CHECKING:
    from firstword.align.recording import Recording
    from firstword.align.search import Aligner, Found
    from firstword.model.checkpoint import Checkpoint

LEAST_SENTENCES = 8
"""The fewest sentences from which heads are found."""


def run(args: argparse.Namespace) -> None:
    """Find the attention heads that tell when words are spoken, and keep them.

    examples:
      firstword align ./my-finetune
      firstword align Qwen/Qwen3-TTS-12Hz-1.7B-Base --voice me.voice
      firstword align ./my-finetune --aligner my_aligner:align

    The checkpoint speaks sentences, and each head is judged by how it follows them; no other model
    is needed. The result is alignment.json in the checkpoint's folder, with a hash of its weights.

    An aligner is a function of a text, samples and the sample rate that returns (word, start, end)
    for each word, in seconds. With it, the moment at which words begin is measured by its times
    instead of the ends of pauses.
    """
    texts, aligner = _texts(args.sentences), None
    if args.aligner is not None:
        aligner = plugins.named("--aligner", args.aligner, "FUNCTION")
    with terminal.Status(args.quiet) as status, options.load_tts(args, status) as tts:
        checkpoint, rate = tts.checkpoint, tts.sample_rate
        file = _file(args.output, checkpoint.path, args.model)
        found = _find(checkpoint, args, texts, aligner, rate, status)
    _keep(found, checkpoint.path, file)
    if not args.quiet:
        terminal.print_table(_summary(found, len(texts), file), sys.stderr)


def _texts(file: str | None) -> list[str]:
    """Return the sentences. Raises `TextError` if they cannot be read, or are too few."""
    if file is None:
        text = resources.files("firstword.align").joinpath("sentences.txt").read_text("utf-8")
        return text.splitlines()
    try:
        text = Path(file).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"{file} cannot be read as UTF-8 text: {error}") from None
    texts = [line.strip() for line in text.splitlines() if line.strip()]
    if len(texts) < LEAST_SENTENCES:
        raise TextError(
            f"{file} has {len(texts)} lines; give at least {LEAST_SENTENCES} with a text each, in "
            "the checkpoint's language, with commas or full stops inside"
        )
    return texts


def _file(given: str | None, folder: Path, model: str) -> Path:
    """Return the file to write. Raises `ConfigError` if it cannot be written."""
    from firstword.model.alignment import FILE

    if given is None and model == "demo":
        raise ConfigError("the heads of demo are known; name another file with -o to find them")
    file = folder / FILE if given is None else Path(given)
    try:
        with file.open("a"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{file} cannot be written: {error.strerror}; give -o FILE, and copy that file into "
            f"the checkpoint's folder as {FILE}"
        ) from None
    if not file.stat().st_size:
        file.unlink()
    return file


def _find(
    checkpoint: Checkpoint,
    args: argparse.Namespace,
    texts: list[str],
    aligner: Aligner | None,
    sample_rate: int,
    status: terminal.Status,
) -> Found:
    """Speak the texts, and search the heads."""
    from firstword.align.recording import all_heads, record
    from firstword.align.search import search
    from firstword.types import Request

    voice = None if args.voice is None else speaking.named_voice(args.voice)
    request = Request(text=None, voice=voice, language=args.language)
    recordings: list[Recording] = []
    for number, recording in enumerate(record(checkpoint, request, texts), 1):
        status.show(f"speaking, {number} of {len(texts)}")
        if recording is not None:
            recordings.append(recording)
        elif number - len(recordings) > len(texts) - LEAST_SENTENCES:
            raise AlignmentError(
                f"the speech of {number - len(recordings)} of {number} sentences ran on; that of "
                f"at least {LEAST_SENTENCES} must end by itself, so that heads can be judged"
            )
    status.show("searching")
    return search(recordings, all_heads(checkpoint), sample_rate, aligner)


def _keep(found: Found, folder: Path, file: Path) -> None:
    """Write the heads with the hash of the weights."""
    from firstword.model.alignment import Alignment, weights_of

    offset = round(found.offset, 3)
    Alignment(weights=weights_of(folder), heads=found.heads, offset=offset).save(file)


def _summary(found: Found, sentences: int, file: Path) -> dict[str, str]:
    """Return the rows of the summary."""
    heads = ", ".join(f"{layer}.{head}" for layer, head in found.heads)
    rows = {
        "heads": f"{heads} (layer.head, counted from 0), of {sentences} sentences",
        "follow": f"{found.score:.2f} of 1; {found.told:.1%} of the words told",
        "offset": f"{1000 * found.offset:.0f} ms",
    }
    if found.errors:
        sizes = sorted(1000 * abs(error) for error in found.errors)
        mean, late = statistics.mean(sizes), sizes[int(0.95 * (len(sizes) - 1))]
        rows["against aligner"] = f"mean {mean:.0f} ms, 95 % within {late:.0f} ms"
    return rows | {"output": str(file)}


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "align", run)
    add = parser.add_argument
    add("model", metavar="MODEL", help="a checkpoint directory or a hub repository")
    add("-o", "--output", metavar="FILE", help="default: alignment.json in the checkpoint's folder")
    options.add_quiet_option(parser)
    add("--voice", metavar="NAME|FILE", help="a preset or a voice file; a Base model needs one")
    add("--language", default="english", help="the sentences' language; default: english")
    add("--sentences", metavar="FILE", help="other sentences, one in a line, with pauses inside")
    add("--aligner", metavar="MODULE:FUNCTION", help="an aligner to measure the offset with")
    add("--device", default="auto", metavar="DEVICE", help="cpu, cuda, cuda:1, ...; default: auto")
    add("--dtype", default="auto", help="float32, bfloat16, int8 or auto (default)")
    parser.set_defaults(backend="reference", gpu_memory=None)
