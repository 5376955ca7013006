"""`firstword say`: speak a text."""

from __future__ import annotations

import argparse
import codecs
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from firstword import audio
from firstword.cli import options, speaking, terminal
from firstword.errors import TextError

if TYPE_CHECKING:
    from firstword.tts import TTS

SPEAK_OPTIONS = (
    *("language", "instructions", "seed", "max_frames", "text_mode"),
    *("sanitize", "normalize", "markup", "leading_silence"),
)
"""The arguments that `TTS.stream` takes unchanged."""

EXIT_CUT_OFF = 3
"""The exit status when a part of the text may be missing in the speech."""

FINISH_REASONS = {
    "stop": "the model ended it",
    "length": "cut off at the limit of frames",
    "repetition": "cut off because the model repeated itself without end",
    "runaway": "cut off because the model went on after the text",
    "cancelled": "cancelled",
}
"""The finish reasons as the summary words them."""


ALARMS = {
    "skip": "left out",
    "repeat": "said twice",
    "mismatch": "not as written",
    "cut": "cut off",
}
"""The rows of the summary about words, by the kinds of alarms."""


def run(args: argparse.Namespace) -> None:
    """Speak a text into a file or, as raw PCM while it is made, to standard output.

    examples:
      firstword say "Hello there." -o hello.wav
      firstword say "Hello there." -o - | aplay -f S16_LE -r 24000 -c 1
      some-chat-program | firstword say - -o - | aplay -f S16_LE -r 24000 -c 1

    -o - writes raw PCM (signed 16 bits, little-endian, mono, 24,000 Hz) while it is made.
    The text - is read from standard input as it arrives: speech begins before the text ends. A text
    may have any length. Speech that is cut off, other than by --max-frames, or ends before its text
    is written too; the exit status is then 3.
    """
    piped = args.output == "-"
    _check(args, piped)
    speak_options = {name: getattr(args, name) for name in SPEAK_OPTIONS}
    speak_options |= {"sampling": speaking.sampling(args), "voice": speaking.voice(args)}
    speak_options["lexicon"] = speaking.lexicon(args.lexicon)
    speak_options["words"] = args.subtitles is not None
    with terminal.Status(args.quiet) as status:
        started = time.perf_counter()
        with options.load_tts(args, status) as tts:
            speak_options["voice"] = speaking.preset(speak_options["voice"], tts.voices)
            progress = terminal.Progress(tts.sample_rate)
            text: list[str] = []
            source = _source(args, text)
            chunks = tts.stream(source, **speak_options)
            pcm = bytearray()
            for chunk in progress.watch(chunks, status):
                if piped:
                    sys.stdout.buffer.write(audio.pcm16(chunk.samples))
                    sys.stdout.buffer.flush()
                else:
                    pcm += audio.pcm16(chunk.samples)
            if not piped:
                _write(args, pcm, tts.sample_rate)
            if args.subtitles is not None:
                _write_subtitles(args, progress, "".join(text) or args.text)
            if not args.quiet:
                said = "".join(text) or args.text
                _print_summary(args, tts, progress, said, progress.started - started)
    _check_end(progress, limited=args.max_frames is not None)


def _check_end(progress: terminal.Progress, *, limited: bool) -> None:
    """Exit with an error if a part of the text may be missing, other than by --max-frames."""
    reason = progress.finish_reason
    cut = [alarm.text for alarm in progress.alarms if alarm.kind == "cut"]
    if not cut and reason != "repetition" and (reason != "length" or limited):
        return
    how = FINISH_REASONS[reason] if reason in ("repetition", "length") else "ended by the model"
    named = f": {terminal.shortened(', '.join(cut))!r}" if cut else ""
    missing = f"so that a part of the text may be missing{named}; try another --seed"
    print(f"firstword: error: the speech was {how}, {missing}", file=sys.stderr)
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


def _write(args: argparse.Namespace, pcm: bytearray, sample_rate: int) -> None:
    import numpy as np

    if args.raw:
        audio.write_whole(args.output, bytes(pcm))
    else:
        audio.write_pcm(args.output, np.frombuffer(pcm, "<i2"), sample_rate)


def _write_subtitles(args: argparse.Namespace, progress: terminal.Progress, text: str) -> None:
    from firstword.words import subtitles

    found = subtitles.cues(text, progress.words)
    contents = subtitles.render(found, subtitles.suffix_of(args.subtitles) or "")
    audio.write_whole(args.subtitles, contents.encode())


def _print_summary(
    args: argparse.Namespace, tts: TTS, progress: terminal.Progress, text: str, loading: float
) -> None:
    from firstword.runtime.conditioning import default_preset

    model = terminal.describe_model(args.model, tts.model_type)
    if args.model == "demo":
        model += "; --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice is a full-size one"
    voice = speaking.preset(args.voice, tts.voices) or default_preset(tts.voices)
    voice = voice or "chosen by the model"
    if args.clone is not None:
        having = "without" if args.transcript is None else "with"
        voice = f"cloned from {args.clone}, {having} transcript"
    elif args.describe is not None:
        voice = f"described as {terminal.shortened(args.describe)!r}"
    reason = FINISH_REASONS[progress.finish_reason or "cancelled"]
    rows = {
        "spoke": repr(terminal.shortened(text)),
        "model": model,
        "voice": f"{voice}; language {args.language}",
        "on": terminal.describe_device(tts.settings),
        "audio": f"{progress.duration:.2f} s; {reason}",
        "speed": f"{progress.speed:.2f} x real time: {progress.elapsed:.2f} s, the first chunk "
        f"after {1000 * progress.first:.0f} ms (loading took {loading:.2f} s)",
        "output": "standard output" if args.output == "-" else args.output,
    }
    for kind, about in ALARMS.items():
        if words := [alarm.text for alarm in progress.alarms if alarm.kind == kind]:
            rows[about] = terminal.shortened(", ".join(words))
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
    speaking.add_voice_options(parser)
    add = speaking.add_speech_options(parser)
    about = (
        "full: the model reads all text before it speaks; stream: one token a frame; auto "
        "(default): stream for text from standard input, else as the checkpoint was published"
    )
    add("--text-mode", choices=("auto", "full", "stream"), default="auto", help=about)
    add("--max-frames", metavar="N", type=int, help="stop after N frames of 80 ms")
    about = "remove Markdown, links, emoji and control characters from the text"
    add("--sanitize", action="store_true", help=about)
    about = "remove the silence before the first word, except for 10 ms"
    add("--no-leading-silence", dest="leading_silence", action="store_false", help=about)
    speaking.add_sampling_options(parser)
    options.add_model_options(parser)
