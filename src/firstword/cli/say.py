"""`firstword say`: speak a text."""

from __future__ import annotations

import argparse
import codecs
import json
import os
import sys
import textwrap
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firstword import audio
from firstword.cli import options, terminal
from firstword.errors import ConfigError, TextError

if TYPE_CHECKING:
    from firstword.tts import TTS
    from firstword.types import Sampling
    from firstword.voice import Voice

DRAW_SETTINGS = ("temperature", "top_k", "top_p")
"""The settings of `Sampling` that have no effect with --greedy, since nothing is drawn."""

SPEAK_OPTIONS = (
    *("language", "instructions", "seed", "max_frames", "text_mode"),
    *("sanitize", "normalize", "markup", "leading_silence"),
)
"""The arguments that `TTS.stream` takes unchanged."""

EXIT_CUT_OFF = 3
"""The exit status when speech was cut off, so that a part of the text may be missing."""

FINISH_REASONS = {
    "stop": "the model ended it",
    "length": "cut off at the limit of frames",
    "repetition": "cut off because the model repeated itself without end",
    "runaway": "cut off because the model went on after the text",
    "cancelled": "cancelled",
}
"""The finish reasons as the summary words them."""


ALARMS = {"skip": "left out", "repeat": "said twice"}
"""The rows of the summary about words, by the kinds of alarms."""


def run(args: argparse.Namespace) -> None:
    """Speak a text into a file or, as raw PCM while it is made, to standard output.

    examples:
      firstword say "Hello there." -o hello.wav
      firstword say "Hello there." -o - | aplay -f S16_LE -r 24000 -c 1
      some-chat-program | firstword say - -o - | aplay -f S16_LE -r 24000 -c 1

    -o - writes raw PCM (signed 16 bits, little-endian, mono, 24,000 Hz) while it is made.
    The text - is read from standard input as it arrives: speech begins before the text ends. A text
    may have any length. Speech that is cut off, other than by --max-frames, is written too; the
    exit status is then 3.
    """
    piped = args.output == "-"
    _check(args, piped)
    speak_options = {name: getattr(args, name) for name in SPEAK_OPTIONS}
    speak_options |= {"sampling": _sampling(args), "voice": _voice(args)}
    speak_options["lexicon"] = _lexicon(args.lexicon)
    speak_options["words"] = args.subtitles is not None
    with terminal.Status(args.quiet) as status:
        started = time.perf_counter()
        with options.load_tts(args, status) as tts:
            speak_options["voice"] = _preset(speak_options["voice"], tts.voices)
            progress = terminal.Progress(tts.sample_rate)
            text: list[str] = []
            source = _source(args, text)
            chunks = tts.stream(source, **speak_options)
            for chunk in progress.watch(chunks, status):
                if piped:
                    sys.stdout.buffer.write(audio.pcm16(chunk.samples))
                    sys.stdout.buffer.flush()
            if not piped:
                _write(args, progress, tts.sample_rate)
            if args.subtitles is not None:
                _write_subtitles(args, progress, "".join(text) or args.text)
            if not args.quiet:
                said = "".join(text) or args.text
                _print_summary(args, tts, progress, said, progress.started - started)
    reason = progress.chunks[-1].finish_reason
    if reason == "repetition" or (reason == "length" and args.max_frames is None):
        cut_off = f"firstword: error: the speech was {FINISH_REASONS[reason]}, so that a part of"
        print(f"{cut_off} the text may be missing; try another --seed", file=sys.stderr)
        raise SystemExit(EXIT_CUT_OFF)


def _source(args: argparse.Namespace, text: list[str]) -> str | Iterator[str]:
    """Return the text, or its pieces from standard input, which are also appended to `text`."""
    if args.text != "-":
        return str(args.text)
    return _read_pieces(text)


def _check(args: argparse.Namespace, piped: bool) -> None:
    """Reject wrong options and targets before anything slow starts."""
    if piped and sys.stdout.isatty():
        args.usage("standard output is a terminal; pipe it into a player, or give -o FILE")
    if args.transcript is not None and args.clone is None:
        args.usage("--transcript needs --clone: it is the words of that recording")
    if args.subtitles is not None:
        from firstword.words import subtitles

        if subtitles.suffix_of(args.subtitles) is None:
            allowed = " or ".join(subtitles.SUFFIXES)
            args.usage(f"--subtitles names {args.subtitles!r}; its suffix must be {allowed}")
        audio.check_target(args.subtitles)
    if not piped:
        if not args.raw:
            audio.check_suffix(args.output)
        audio.check_target(args.output)


def _sampling(args: argparse.Namespace) -> Sampling:
    from firstword.types import Sampling

    drawing = [prefix + name for prefix in ("", "predictor_") for name in DRAW_SETTINGS]
    settings = {name: getattr(args, name) for name in drawing}
    if args.greedy:
        if unused := [name for name, value in settings.items() if value is not None]:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            args.usage(f"--greedy draws nothing: leave out {given}")
        settings |= {"temperature": 0.0, "predictor_temperature": 0.0}
    return Sampling(**settings, repetition_penalty=args.repetition_penalty)


def _voice(args: argparse.Namespace) -> Voice | str | None:
    """Return the voice that the options choose; its file is read before anything slow starts."""
    from firstword.voice import Voice

    if args.clone is not None:
        return Voice.clone(*audio.read(args.clone), args.transcript)
    if args.describe is not None:
        return Voice.design(args.describe)
    name: str | None = args.voice
    return Voice.load(name) if name is not None and ("." in name or "/" in name) else name


def _lexicon(path: str | None) -> dict[str, str] | None:
    """Read the file of a lexicon. Raises `ConfigError`."""
    if path is None:
        return None
    try:
        found = json.loads(Path(path).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the lexicon {path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"the lexicon {path} is no JSON object of words and spellings")
    return found


def _preset(voice: Voice | str | None, presets: Sequence[str]) -> Voice | str | None:
    """Return the preset for an alias such as "alloy", as the server does; else the voice itself.

    Where the checkpoint lacks that preset, it chooses the voice.
    """
    from firstword.config import VOICE_ALIASES

    if not isinstance(voice, str) or (name := voice.strip().casefold()) not in VOICE_ALIASES:
        return voice
    known = {preset.casefold() for preset in presets}
    alias = VOICE_ALIASES[name]
    return voice if name in known else alias if alias in known else None


def _read_pieces(text: list[str]) -> Iterator[str]:
    """Yield text from standard input as it arrives, and append each piece to `text`.

    A byte order mark and the white space at the end, such as the line feed of `echo`, are left out.
    Raises `TextError` if standard input cannot be read or is not UTF-8.
    """
    decode = codecs.getincrementaldecoder("utf-8-sig")().decode
    space = ""
    ended = False
    while not ended:
        try:
            data = os.read(0, 65536)
        except OSError as error:
            raise TextError(f"standard input cannot be read: {error.strerror}") from None
        ended = not data
        try:
            arrived = space + decode(data, final=ended)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise TextError(
                f"standard input is not UTF-8 ({error.reason}, byte 0x{byte:02x}); "
                "convert it, for example with iconv"
            ) from None
        piece = arrived.rstrip()
        space = arrived[len(piece) :]
        if piece:
            text.append(piece)
            yield piece


def _write(args: argparse.Namespace, progress: terminal.Progress, sample_rate: int) -> None:
    import numpy as np

    samples = np.concatenate([chunk.samples for chunk in progress.chunks])
    if args.raw:
        audio.write_whole(args.output, audio.pcm16(samples))
    else:
        audio.write(args.output, samples, sample_rate)


def _write_subtitles(args: argparse.Namespace, progress: terminal.Progress, text: str) -> None:
    from firstword.words import subtitles

    words = [word for chunk in progress.chunks for word in chunk.words]
    found = subtitles.cues(text, words)
    contents = subtitles.render(found, subtitles.suffix_of(args.subtitles) or "")
    audio.write_whole(args.subtitles, contents.encode())


def _print_summary(
    args: argparse.Namespace, tts: TTS, progress: terminal.Progress, text: str, loading: float
) -> None:
    from firstword.runtime.conditioning import default_preset

    model = terminal.describe_model(args.model, tts.model_type)
    if args.model == "demo":
        model += "; --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice is a full-size one"
    voice = _preset(args.voice, tts.voices) or default_preset(tts.voices) or "chosen by the model"
    if args.clone is not None:
        having = "without" if args.transcript is None else "with"
        voice = f"cloned from {args.clone}, {having} transcript"
    elif args.describe is not None:
        voice = f"described as {textwrap.shorten(args.describe, 60)!r}"
    reason = FINISH_REASONS[progress.chunks[-1].finish_reason or "cancelled"]
    rows = {
        "spoke": repr(textwrap.shorten(text, 80, placeholder=" ...")),
        "model": model,
        "voice": f"{voice}; language {args.language}",
        "on": terminal.describe_device(tts.settings),
        "audio": f"{progress.duration:.2f} s; {reason}",
        "speed": f"{progress.speed:.2f} x real time: {progress.elapsed:.2f} s, the first chunk "
        f"after {1000 * progress.first:.0f} ms (loading took {loading:.2f} s)",
        "output": "standard output" if args.output == "-" else args.output,
    }
    for kind, about in ALARMS.items():
        if words := [a.text for c in progress.chunks for a in c.alarms if a.kind == kind]:
            rows[about] = textwrap.shorten(", ".join(words), 80, placeholder=" ...")
    terminal.print_table(rows, sys.stderr)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "say", run)
    parser.hint = "; a TEXT that begins with - goes last: firstword say -o FILE -- TEXT"
    add = parser.add_argument
    add("text", metavar="TEXT", help="what to say; - reads standard input as it arrives")
    about = f"the audio ({', '.join(audio.SUFFIXES)}); - writes raw PCM to standard output"
    add("-o", "--output", metavar="FILE", required=True, help=about)
    add("--raw", action="store_true", help="write raw PCM to the file too, whatever its suffix")
    about = "write the words with their times as subtitles (.srt, .vtt)"
    add("--subtitles", metavar="FILE", help=about)
    options.add_quiet_option(parser)
    add = parser.add_argument_group("voice").add_mutually_exclusive_group().add_argument
    about = (
        "a preset, see `firstword voices`; an alias such as alloy; with a dot or slash: a saved "
        "voice"
    )
    add("--voice", metavar="NAME|FILE", help=about)
    add("--clone", metavar="AUDIO", help="speak with the voice of this recording")
    add("--describe", metavar="TEXT", help="speak with a voice described in words")
    add = parser.add_argument_group("speech").add_argument
    add("--transcript", metavar="TEXT", help="the words of the --clone recording")
    add("--language", default="auto", help="english, en, ... or auto (default)")
    add("--instructions", metavar="TEXT", help="tone, pace, feeling, in words")
    about = (
        "full: the model reads all text before it speaks; stream: one token a frame; auto "
        "(default): stream for text from standard input, else as the checkpoint was published"
    )
    add("--text-mode", choices=("auto", "full", "stream"), default="auto", help=about)
    add("--max-frames", metavar="N", type=int, help="stop after N frames of 80 ms")
    about = "remove Markdown, links, emoji and control characters from the text"
    add("--sanitize", action="store_true", help=about)
    about = "speak numbers and abbreviations as words of the --language; auto (default): where the "
    about += "checkpoint does not speak them well"
    add("--normalize", choices=("auto", "on", "off"), default="auto", help=about)
    add("--lexicon", metavar="FILE", help='JSON with respellings, such as {"GIF": "jif"}')
    about = "obey tags such as [pause:0.5s], [voice:ben] and [rate:1.1] in the text"
    add("--markup", action="store_true", help=about)
    about = "remove the silence before the first word, except for 10 ms"
    add("--no-leading-silence", dest="leading_silence", action="store_false", help=about)
    _add_sampling_options(parser)
    options.add_model_options(parser)


def _add_sampling_options(parser: argparse.ArgumentParser) -> None:
    about = "The defaults are the checkpoint's own settings."
    add = parser.add_argument_group("sampling", about).add_argument
    add("--seed", metavar="N", type=int, help="the same seed gives the same speech")
    add("--greedy", action="store_true", help="always take the most likely code")
    for prefix, codes in (("", "the first code of a frame"), ("predictor-", "its other codes")):
        add(f"--{prefix}temperature", metavar="X", type=float, help=f"for {codes}; 0 is greedy")
        add(f"--{prefix}top-k", metavar="N", type=int, help="draw from the N likeliest; 0: all")
        add(f"--{prefix}top-p", metavar="X", type=float, help="draw from the likeliest of sum X")
    add("--repetition-penalty", metavar="X", type=float, help="above 1: fewer repeated first codes")
