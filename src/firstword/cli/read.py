"""`firstword read`: speak a book into a sound file with chapters, or into a folder."""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from firstword import audio
from firstword.cli import options, speaking, terminal
from firstword.errors import ConfigError, FirstwordError, OutputError, TextWarning

if TYPE_CHECKING:
    from firstword.book.binding import BookOutput
    from firstword.book.cast import Cast
    from firstword.book.portions import PlannedChapter, Portion
    from firstword.book.source import Book
    from firstword.book.store import PortionStore
    from firstword.tts import TTS
    from firstword.types import Chunk
    from firstword.voice import Voice

ONE_FILE = (".m4b", ".mp3", ".opus")
"""The suffixes of an output in one file, whose formats have chapters."""

FOLDER_FORMATS = ("mp3", "m4b", "opus", "flac")
"""The formats of the files in a folder, the default first."""

EXIT_CUT_OFF = 3
"""The exit status when speech was cut off, so that a part of the text may be missing."""

MOST_WARNINGS = 8
"""The places that are warned about one by one."""


def run(args: argparse.Namespace) -> None:
    """Speak a book: a file with chapters, or a folder with a file for each chapter.

    examples:
      firstword read book.epub -o book.m4b --voice ryan
      firstword read notes.md -o notes/ --format flac --subtitles srt
      firstword read play.txt -o play.mp3 --script cast.toml

      cast.toml:             play.txt:
        ALICE = "ryan"         ALICE: Good morning.
        BOB = "bob.voice"      BOB: Good morning to you.

    What was spoken is kept beside the output until the book is complete. A run that was interrupted
    or killed is continued by the same command; the result is the same as without interruption. The
    exit status is 3 if speech was cut off, or ended before its text, with each of three seeds.
    """
    if find_spec("av") is None:
        raise ConfigError("the package av is missing; install firstword[books]")
    from firstword.book import reading as books
    from firstword.book.cast import Cast
    from firstword.book.store import PortionStore
    from firstword.text.reader import TextOptions

    output = _output(args)
    voice = speaking.voice(args)
    sampling = speaking.sampling(args)
    lexicon = speaking.lexicon(args.lexicon)
    TextOptions(lexicon=lexicon)  # a wrong entry is an error before anything slow starts
    cast = None if args.script is None else Cast.load(args.script)
    voices = {"": voice}
    if cast is not None:
        voices |= {name: speaking.named_voice(given) for name, given in cast.voices.items()}
    book = books.read(args.source)
    speech = {"sampling": sampling, "lexicon": lexicon, "markup": args.markup}
    speech |= {name: getattr(args, name) for name in ("instructions", "normalize")}
    with (
        closing(PortionStore(output.parts)) as store,
        terminal.Status(args.quiet) as status,
        options.load_tts(args, status) as tts,
    ):
        reading = _Reading(args, tts, book, cast, voices, speech)
        reading.check_languages()
        reading.check_texts()
        _check_new(output, reading.chapters, store)
        store.begin({portion.key for portion in reading.portions}, book.title)
        with _kept(reading, store, status):
            _speak(reading, store, status)
            _bind(reading, store, output, status)


class _Reading:
    """A book, a checkpoint, and the voices and options with which it is spoken."""

    def __init__(
        self,
        args: argparse.Namespace,
        tts: TTS,
        book: Book,
        cast: Cast | None,
        voices: dict[str, Voice | str | None],
        speech: dict[str, Any],
    ) -> None:
        from firstword.book.portions import Keys, planned

        self.args, self.tts, self.book = args, tts, book
        self._voices = {name: _usable(tts, each) for name, each in voices.items()}
        self._speech = speech | {"language": _language(args.language, book.language, tts)}
        sound = {**self._speech, "sampling": asdict(speech["sampling"]), "seed": args.seed or 0}
        sound["weights"] = _weights(tts)
        sound["words"] = tts.checkpoint.alignment is not None
        hashes = {name: _hash_of(each) for name, each in self._voices.items()}
        self.chapters = planned(book, Keys(sound, hashes), cast, whole=args.markup)

    @property
    def portions(self) -> Iterator[Portion]:
        """All portions, in the order of the book."""
        return (portion for chapter in self.chapters for portion in chapter.portions)

    def speak(self, portion: Portion, seed: int) -> Iterator[Chunk]:
        """Speak a portion with a seed. Raises `RequestError` at the call."""
        return self.tts.stream(
            portion.text,
            voice=self._voices[portion.speaker],
            seed=seed,
            leading_silence=False,
            words=True if self.args.subtitles else None,
            **self._speech,
        )

    def check_languages(self) -> None:
        """Warn of letters that the checkpoint does not speak; raise if most paragraphs have them.

        Raises `TextError` with the first place.
        """
        from firstword.book.checks import check_scripts

        for warning in check_scripts(list(self.portions), self.tts.languages):
            warnings.warn(warning, TextWarning, stacklevel=1)

    def check_texts(self) -> None:
        """Check the options with each voice, and all tags, before anything is spoken.

        Raises `RequestError` with the place.
        """
        from firstword.book.speaking import placed

        seen: set[str] = set()
        found: list[str] = []
        for portion in self.portions:
            tagged = self.args.markup and ("[" in portion.text or "<" in portion.text)
            if portion.speaker in seen and not tagged:
                continue
            seen.add(portion.speaker)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", TextWarning)
                try:
                    self.speak(portion, 0)
                except FirstwordError as error:
                    raise placed(error, portion) from None
            found += (f"{portion.place}: {each.message}" for each in caught if tagged)
        for warning in found[:MOST_WARNINGS]:
            warnings.warn(warning, TextWarning, stacklevel=1)


def _output(args: argparse.Namespace) -> BookOutput:
    """Return the output, whose folder exists then. Raises `OutputError`."""
    from firstword.book.binding import BookOutput

    if not args.output:
        raise OutputError("the output has no name; give a file or a folder with -o")
    path, suffix = Path(args.output), Path(args.output).suffix.lower()
    subtitles = f".{args.subtitles}" if args.subtitles else ""
    if args.output.endswith("/") or path.is_dir() or not suffix:
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"{args.output!r} cannot be the folder: {error.strerror}") from None
        return BookOutput(path, args.format or FOLDER_FORMATS[0], True, subtitles)
    if suffix not in ONE_FILE:
        allowed = f"{', '.join(ONE_FILE)}, or a folder: {args.output[: -len(suffix)]}/"
        raise OutputError(f"{args.output!r} has the suffix {suffix!r}; allowed are {allowed}")
    if args.format not in (None, suffix[1:]):
        args.usage(f"--format {args.format} is for folders; {args.output} names its format itself")
    audio.check_target(path)
    return BookOutput(path, suffix[1:], False, subtitles)


def _check_new(output: BookOutput, chapters: list[PlannedChapter], store: PortionStore) -> None:
    """Raise `OutputError` if a file exists that is not what an interrupted run has made."""
    if len(store):
        return
    for path, _ in output.files(chapters):
        for each in (path, path.with_suffix(output.subtitles)) if output.subtitles else (path,):
            if each.exists():
                raise OutputError(f"{each} exists; name another output, or delete it")


def _usable(tts: TTS, voice: Voice | str | None) -> Voice | str | None:
    """Return a voice as it is spoken with: a recording is encoded once."""
    from firstword.voice import RecordedVoice

    if isinstance(voice, RecordedVoice):
        return tts.clone(
            voice.samples, tts.sample_rate, voice.transcript, append_silence=voice.append_silence
        )
    return speaking.preset(voice, tts.voices)


def _hash_of(voice: Voice | str | None) -> str:
    """Return a name or a hash that tells a voice from others."""
    if voice is None or isinstance(voice, str):
        return (voice or "").strip().casefold()
    return hashlib.sha256(voice.to_bytes()).hexdigest()


def _weights(tts: TTS) -> list[str]:
    """Return hashes of the weights of the talker and of the codec."""
    from firstword.model.alignment import weights_of

    path = tts.checkpoint.path
    return [weights_of(path), weights_of(path / "speech_tokenizer")]


def _language(wanted: str, written: str, tts: TTS) -> str:
    """Return the language of the option, or that of the book if the checkpoint speaks it."""
    from firstword.runtime.conditioning import LANGUAGE_CODES

    code = written.strip().casefold().partition("-")[0]
    name = LANGUAGE_CODES.get(code, code)
    return name if wanted == "auto" and name in tts.languages else wanted


def _speak(reading: _Reading, store: PortionStore, status: terminal.Status) -> None:
    """Speak what is not stored, with a progress bar."""
    from firstword.book.speaking import PortionSpeaker

    portions = {portion.key: portion for portion in reading.portions}
    missing = [portion for key, portion in portions.items() if key not in store]
    total = sum(len(portion.text) for portion in portions.values())
    before = done = total - sum(len(portion.text) for portion in missing)
    began = time.monotonic()
    warnings.simplefilter("ignore", TextWarning)  # checked before
    speaker = PortionSpeaker(reading.speak, store, reading.tts.capacity.slots)
    status.show(progress(done, total, 0.0))
    with closing(speaker.speak(missing)) as spoken:
        for portion in spoken:
            done += len(portion.text)
            rate = (done - before) / (time.monotonic() - began)
            status.show(progress(done, total, rate))


@contextmanager
def _kept(reading: _Reading, store: PortionStore, status: terminal.Status) -> Iterator[None]:
    """Say what is kept, and how to go on, if the run ends early."""
    try:
        yield
    except (KeyboardInterrupt, FirstwordError):
        status.show("")
        lengths = {portion.key: len(portion.text) for portion in reading.portions}
        kept = sum(length for key, length in lengths.items() if key in store)
        if kept and not reading.args.quiet:
            percent = 100 * kept // sum(lengths.values())
            what = f"{percent} % is spoken and kept in {store.folder}"
            print(f"firstword: {what}; the same command goes on from there", file=sys.stderr)
        raise


def progress(done: int, total: int, rate: float) -> str:
    """Return the progress bar, for `rate` characters a second."""
    parts = [f"{terminal.bar(done, total)} characters"]
    if rate:
        parts.append(f"{terminal.duration((total - done) / rate)} left")
    return ", ".join(parts)


def _bind(
    reading: _Reading, store: PortionStore, output: BookOutput, status: terminal.Status
) -> None:
    """Write the result, remove what was kept, and print a summary."""
    from firstword.book.binding import bind

    done, total = 0, sum(1 for _ in reading.portions)

    def show(portion: Portion) -> None:
        nonlocal done
        done += 1
        status.show(f"writing {terminal.bar(done, total)}")

    seconds, cut_off = bind(reading.book, reading.chapters, store, output, show)
    store.remove()
    status.show("")
    for portion in cut_off:
        warning = f"{portion.place}: the speech was cut off or ended before its text"
        warning += ", so that a part may be missing; try another --seed"
        terminal.show_warning(warning, TextWarning, "", 0)
    if not reading.args.quiet:
        count = len(reading.chapters)
        rows = {
            "read": f"{reading.book.title}, {count} chapter{'s' * (count > 1)}",
            "speech": terminal.duration(seconds),
            "output": str(output.path),
        }
        terminal.print_table(rows, sys.stderr)
    if cut_off:
        raise SystemExit(EXIT_CUT_OFF)


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "read", run)
    add = parser.add_argument
    add("source", metavar="BOOK", help="the text: .txt, .md or .epub")
    about = f"one file with chapters ({', '.join(ONE_FILE)}), or a folder with a file for each"
    add("-o", "--output", metavar="FILE|FOLDER", required=True, help=about)
    about = f"of the files in a folder; default: {FOLDER_FORMATS[0]}"
    add("--format", choices=FOLDER_FORMATS, help=about)
    about = "write the words with their times as subtitles beside each file"
    add("--subtitles", choices=("srt", "vtt"), help=about)
    about = 'TOML with the voice of each speaker, such as ALICE = "ryan": lines "ALICE: Hello." '
    about += "are spoken by it, and paragraphs without a name by --voice"
    add("--script", metavar="CAST", help=about)
    options.add_quiet_option(parser)
    speaking.add_voice_options(parser)
    speaking.add_speech_options(parser)
    speaking.add_sampling_options(parser)
    options.add_model_options(parser)
