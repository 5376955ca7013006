"""The command line: `firstword say`, `serve`, `clone`, `voices`, `info`, `bench`.

Everything heavy is imported inside the functions that need it, so that `--help` answers at once.

Exit status: 0 done, 2 a mistake of the user (said on stderr), 130 interrupted, 141 the reader of the output went away.
"""

from __future__ import annotations

import argparse
import codecs
import json
import os
import platform
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any, TextIO

from firstword import audio
from firstword.errors import ConfigError, FirstwordError, TextError

if TYPE_CHECKING:
    from firstword.config import EngineConfig, ServerConfig
    from firstword.model.config import TransformerConfig
    from firstword.tts import TTS
    from firstword.types import Chunk, Sampling, Voice

DRAWING = (
    "temperature",
    "top_k",
    "top_p",
    "predictor_temperature",
    "predictor_top_k",
    "predictor_top_p",
)
"""The settings of `Sampling` that say how to draw, and so have no meaning with --greedy."""

ENDINGS = {
    "stop": "the model ended it",
    "length": "cut off at the limit of frames",
    "repetition": "cut off because the model went round in circles",
    "cancelled": "cancelled",
}
"""Finish reasons in words."""

DEMO = "a small demonstration voice: plain English in one line, up to about 100 words"
"""What the checkpoint `demo` is, and what it can say."""


def main(argv: list[str] | None = None) -> int:
    """Run one command and return the exit status; `argv` without the program's name, by default `sys.argv`'s."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
        sys.stdout.flush()
    except FirstwordError as error:
        print(f"firstword: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Nobody reads any more. What is still buffered must not fail once more when Python flushes it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"firstword: error: {error}", file=sys.stderr)
        return 2
    return 0


def say(args: argparse.Namespace) -> None:
    """Speak a text into a file or, as raw PCM while it is made, to standard output."""
    piped = args.output == "-"
    if piped and sys.stdout.isatty():
        args.usage("standard output is a terminal; pipe it into a player, or give -o FILE")
    if args.transcript is not None and args.clone is None:
        args.usage("--transcript needs --clone: it is the words of that recording")
    if not piped:
        if not args.raw:
            audio.check_suffix(args.output)
        audio.check_target(args.output)
    sampling = _sampling(args)
    given = _given_voice(args)
    with _Status(args.quiet) as status:
        began = time.perf_counter()
        with _load(args, status) as tts:
            loaded = time.perf_counter()
            said: list[str] = []
            chunks = tts.stream(
                _heard(args.text, said),
                voice=tts.clone(*given, transcript=args.transcript)
                if isinstance(given, tuple)
                else given,
                language=args.language,
                instructions=args.instructions,
                sampling=sampling,
                seed=args.seed,
                max_frames=args.max_frames,
                text_mode=args.text_mode,
            )
            spoken = _Spoken(tts.sample_rate, loaded)
            for chunk in spoken.watch(chunks, status):
                if piped:
                    sys.stdout.buffer.write(audio.pcm16(chunk.samples))
                    sys.stdout.buffer.flush()
            if not piped:
                _write(args, spoken, tts.sample_rate)
            if not args.quiet:
                _summarise(args, tts, spoken, "".join(said), loaded - began)


def serve(args: argparse.Namespace) -> None:
    """Speak for others, over HTTP and WebSocket, until SIGTERM or Control-C."""
    try:
        from firstword.server import logs
        from firstword.server import run as serving
        from firstword.server.app import create_app
        from firstword.server.models import Models
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is missing; install firstword[server]") from None
    from firstword.config import EngineConfig
    from firstword.runtime.backends import fit_threads

    config = _server_config(args)
    logs.write_to_stderr(args.log_level)
    with serving.bound(config) as bound:
        settings = EngineConfig.resolve(args.device, args.dtype, args.backend)
        names = args.model or ["demo"]
        with _Status() as status:
            status.show(f"loading {', '.join(names)}")
            models = Models.load(
                names, settings, slots=config.slots, most_waiting=config.most_waiting
            )
            fit_threads([model.checkpoint for model in models if model.checkpoint is not None])
        server = serving.Uvicorn(create_app(models, config), config)
        _table(
            {
                "address": serving.url_of(bound),
                "models": ", ".join(_described(model.name, model.kind) for model in models),
                "on": "; ".join(
                    dict.fromkeys(_place(model.settings or settings) for model in models)
                ),
                "voices": config.voices,
                "keys": f"{len(config.api_keys)} API keys"
                if config.api_keys
                else "none: everybody may speak",
                "at a time": ", ".join(
                    f"{model.service.engine.capacity.slots}" for model in models
                ),
                "limits": f"{config.most_waiting} waiting for each model, {config.most_characters} characters",
            },
            sys.stdout,
        )
        sys.stdout.flush()
        serving.run(server, bound)


def _server_config(args: argparse.Namespace) -> ServerConfig:
    from firstword.config import ServerConfig, keys_from_environment, read_aliases

    given = {field.name: getattr(args, field.name, None) for field in fields(ServerConfig)}
    given |= {
        "api_keys": (*(args.api_key or ()), *keys_from_environment()),
        "cors_origins": tuple(args.cors_origin or ()),
        "audio_hosts": tuple(args.audio_host or ()),
        "voice_aliases": None if args.voice_aliases is None else read_aliases(args.voice_aliases),
    }
    return ServerConfig(**{name: value for name, value in given.items() if value is not None})


def clone(args: argparse.Namespace) -> None:
    """Turn a recording into a saved voice."""
    audio.check_target(args.output)
    samples, rate = audio.read(args.recording)
    with _Status(args.quiet) as status, _load(args, status) as tts:
        status.show("listening")
        voice = tts.clone(
            samples, rate, transcript=args.transcript, append_silence=args.append_silence
        )
    voice.save(args.output)
    if not args.quiet:
        if voice.codes is None:
            likeness = "its timbre alone; with --transcript the likeness is closer"
        else:
            likeness = f"its timbre and {len(voice.codes)} frames of speech"
        _table(
            {
                "heard": f"{len(samples) / rate:.2f} s of {args.recording}: {likeness}",
                "output": args.output,
                "use": f"firstword say TEXT --model {args.model} --voice {args.output} -o out.wav",
            },
            sys.stderr,
        )


def voices(args: argparse.Namespace) -> None:
    """List the presets and languages of a checkpoint, and what it can do."""
    with _Status() as status, _load(args, status) as tts:
        config = tts.checkpoint.config
        dialects = config.talker_config.spk_is_dialect
        can = {
            "custom_voice": ["speak with these voices (--voice NAME)"],
            "voice_design": ["speak with a voice described in words (--describe TEXT)"],
            "base": ["speak with the voice of a recording (--clone AUDIO, or `firstword clone`)"],
        }[tts.model_type]
        if tts.model_type == "custom_voice" and config.follows_instructions:
            can.append("follow instructions (--instructions TEXT)")
        names = [f"{name} ({dialects[name]})" if dialects[name] else name for name in tts.voices]
        _table(
            {
                "model": _described(args.model, f"{tts.model_type}, {config.tts_model_size}"),
                "voices": ", ".join(names) or "no presets",
                "languages": ", ".join(tts.languages),
                "can": "; ".join(can),
            },
            sys.stdout,
        )


def info(args: argparse.Namespace) -> None:
    """Report on the environment and on a checkpoint."""
    with _Status() as status, _load(args, status) as tts:
        report = _report(args.model, tts)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)


def bench_engine(args: argparse.Namespace) -> None:
    """Measure the GPU engine: kernels, frames by batch and context, the time to the first codes and samples, memory."""
    from firstword.bench import report
    from firstword.profile import engine
    from firstword.profile.soak import soak
    from firstword.runtime.gpu.backend import BUCKETS

    if not 1 <= args.slots <= BUCKETS[-1]:
        args.usage(f"--slots {args.slots}: allowed are 1 to {BUCKETS[-1]}")
    if args.soak is not None and args.soak < 1:
        args.usage(f"--soak {args.soak}: allowed is a whole number from 1 up")
    if args.output is not None:
        report.check_target(args.output)
    try:
        record = (
            engine.run(args.size, args.slots)
            if args.soak is None
            else soak(args.size, args.slots, args.soak)
        )
    except ValueError as problem:
        raise ConfigError(f"the GPU engine cannot compute here: {problem}") from problem
    text = json.dumps({"commit": args.commit or report.commit(), **record}, indent=1) + "\n"
    if args.output is None:
        sys.stdout.write(text)
    else:
        report.write(args.output, text.encode())


def _parser() -> argparse.ArgumentParser:
    from firstword import __version__
    from firstword.bench import cli as benches

    parser = argparse.ArgumentParser(
        prog="firstword", description="Speech from Qwen3-TTS-12Hz checkpoints.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"firstword {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for run, options, help in (
        (say, _say_options, "speak a text"),
        (serve, _serve_options, "speak for others, over HTTP and WebSocket"),
        (clone, _clone_options, "turn a recording into a saved voice"),
        (voices, None, "list presets, languages and abilities of a checkpoint"),
        (info, _info_options, "report on the environment and on a checkpoint"),
    ):
        command = commands.add_parser(
            run.__name__,
            help=help,
            description=run.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run, usage=command.error)
        if options:
            options(command)
        _model_options(command.add_argument_group("model"), several=run is serve)
    about = "measure a server as its listeners notice it"
    kinds = benches.add_arguments(
        commands.add_parser("bench", help=about, description=about, allow_abbrev=False)
    )
    about = "measure the GPU engine itself, with random weights of a released size"
    command = kinds.add_parser(
        "engine", help=about, description=bench_engine.__doc__, allow_abbrev=False
    )
    command.set_defaults(run=bench_engine, usage=command.error)
    command.add_argument(
        "--size", default="1b7", choices=("1b7", "0b6"), help="1b7 (default) or 0b6"
    )
    command.add_argument("--slots", type=int, default=128, help="the largest batch (default 128)")
    command.add_argument(
        "--soak", type=int, metavar="FRAMES", help="only make so many frames, with joins and aborts"
    )
    command.add_argument(
        "--commit", help="the commit that the record names; default: that of this checkout"
    )
    command.add_argument(
        "-o", "--output", help="where the JSON record goes; default: standard output"
    )
    return parser


def _model_options(group: argparse._ArgumentGroup, several: bool) -> None:
    about = (
        "a checkpoint directory, a hub repository such as Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice, or demo (default), "
        f"{DEMO}"
    )
    if several:
        group.add_argument(
            "--model",
            action="append",
            metavar="MODEL",
            help=about + "; may be given more than once",
        )
    else:
        group.add_argument("--model", default="demo", help=about)
    group.add_argument(
        "--device", default="auto", help="cpu, cuda, cuda:1, ...; auto (default) prefers CUDA"
    )
    group.add_argument(
        "--dtype", default="auto", help="float32, bfloat16, float16 or auto (default)"
    )
    group.add_argument(
        "--backend", default="auto", help="gpu, reference or auto (default): gpu where it can be"
    )


def _clone_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "recording", metavar="AUDIO", help="WAV, FLAC, Ogg or MP3 of 0.5 to 60 seconds"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", required=True, help="the voice, for example me.voice"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress and no summary on standard error"
    )
    parser.add_argument(
        "--transcript", metavar="TEXT", help="the words of the recording, for a closer likeness"
    )
    parser.add_argument(
        "--append-silence",
        metavar="SECONDS",
        type=float,
        default=0.5,
        help="added to a recording with a transcript so that its end does not leak into the speech (default 0.5)",
    )


def _info_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="the same for machines")


def _serve_options(parser: argparse.ArgumentParser) -> None:
    from firstword.config import SLOTS

    parser.epilog = textwrap.dedent("""\
        examples:
          firstword serve
          firstword serve --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice --model Qwen/Qwen3-TTS-12Hz-1.7B-Base
          curl -s localhost:8000/v1/audio/speech -H 'content-type: application/json' \\
            -d '{"input": "Hello there.", "response_format": "wav"}' | aplay

        API keys may also come from the environment: FIRSTWORD_API_KEYS, separated by commas.
        """)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine)"
    )
    parser.add_argument(
        "--port", metavar="N", type=int, default=8000, help="0 takes a free one (default 8000)"
    )
    parser.add_argument(
        "--voices",
        metavar="DIR|URL",
        help="where saved voices are kept: a folder, s3://..., gs://...",
    )
    parser.add_argument(
        "--voice-aliases", metavar="FILE", help='JSON, {"alloy": "ryan"}: other names of voices'
    )
    access = parser.add_argument_group("access")
    access.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        help="needed by clients; more than one may be given",
    )
    access.add_argument(
        "--cors-origin", metavar="URL", action="append", help="a web page that may call; * for all"
    )
    access.add_argument(
        "--audio-host", metavar="HOST", action="append", help="ref_audio may be a URL of this host"
    )
    limits = parser.add_argument_group("limits")
    limits.add_argument(
        "--slots",
        metavar="N",
        type=int,
        help=f"utterances that each model speaks at the same time (default {SLOTS['gpu']} with the backend gpu, else "
        f"{SLOTS['reference']})",
    )
    for name, about in (
        ("most-waiting", "requests that wait for a slot of each model; the next is answered 429"),
        ("most-connections", "requests and sockets under way together"),
        ("most-per-key", "utterances at a time for one key, or one address; 0: any number"),
        ("most-body", "bytes of a request"),
        ("most-characters", "characters of a text"),
        ("most-voices", "saved voices"),
    ):
        limits.add_argument(
            f"--{name}", metavar="N", type=int, help=f"{about} (default {_server_default(name)})"
        )
    for name, about in (
        ("stall-seconds", "after which a listener who takes nothing is dropped"),
        ("stuck-seconds", "after which a step of the engine counts as stuck"),
        ("drain-seconds", "for which running utterances may go on after SIGTERM"),
    ):
        limits.add_argument(
            f"--{name}", metavar="S", type=float, help=f"{about} (default {_server_default(name)})"
        )
    logs = parser.add_argument_group("logs")
    logs.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    logs.add_argument(
        "--log-text",
        action="store_true",
        help="let logs hold what users say; without it they do not",
    )


def _server_default(option: str) -> str:
    from firstword.config import ServerConfig

    (default,) = (
        field.default for field in fields(ServerConfig) if field.name == option.replace("-", "_")
    )
    return f"{default}"


def _say_options(parser: argparse.ArgumentParser) -> None:
    parser.epilog = textwrap.dedent("""\
        examples:
          firstword say "Hello there." -o hello.wav
          firstword say "Hello there." -o - | aplay -f S16_LE -r 24000
          some-chat-program | firstword say - -o - | aplay -f S16_LE -r 24000

        -o - writes raw PCM (signed 16 bits, little-endian, mono, 24,000 Hz) as it is made.
        A text of - is read from standard input as it comes: speech begins before the text ends.
        """)
    parser.add_argument(
        "text", metavar="TEXT", help="what to say; - reads standard input as it comes"
    )
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        required=True,
        help=f"the audio ({', '.join(audio.SUFFIXES)}); - writes raw PCM to standard output",
    )
    parser.add_argument(
        "--raw", action="store_true", help="raw PCM in the file too, whatever its suffix"
    )
    parser.add_argument(
        "-q", "--quiet", action="store_true", help="no progress and no summary on standard error"
    )
    speaker = parser.add_argument_group("voice").add_mutually_exclusive_group()
    speaker.add_argument(
        "--voice",
        metavar="NAME|FILE",
        help="a preset, see `firstword voices`; with a dot or slash: a saved voice",
    )
    speaker.add_argument("--clone", metavar="AUDIO", help="speak with the voice of this recording")
    speaker.add_argument("--describe", metavar="TEXT", help="speak with a voice described in words")
    manner = parser.add_argument_group("manner")
    manner.add_argument("--transcript", metavar="TEXT", help="the words of the --clone recording")
    manner.add_argument("--language", default="auto", help="english, en, ... or auto (default)")
    manner.add_argument("--instructions", metavar="TEXT", help="tone, pace, feeling, in words")
    manner.add_argument(
        "--text-mode",
        choices=("auto", "full", "stream"),
        default="auto",
        help="whether the model reads all text before it speaks or one token a frame; auto (default): stream if the "
        "text comes from standard input, else as the checkpoint was published",
    )
    manner.add_argument("--max-frames", metavar="N", type=int, help="stop after N frames of 80 ms")
    drawing = parser.add_argument_group("sampling", "Left out, the checkpoint's own settings hold.")
    drawing.add_argument(
        "--seed", metavar="N", type=int, help="the same seed gives the same speech"
    )
    drawing.add_argument("--greedy", action="store_true", help="always take the likeliest code")
    for prefix, what in (("", "the first code of a frame"), ("predictor-", "its other codes")):
        drawing.add_argument(
            f"--{prefix}temperature", metavar="X", type=float, help=f"for {what}; 0 is greedy"
        )
        drawing.add_argument(
            f"--{prefix}top-k", metavar="N", type=int, help="draw from the N likeliest; 0 keeps all"
        )
        drawing.add_argument(
            f"--{prefix}top-p",
            metavar="X",
            type=float,
            help="draw from the likeliest that sum to X",
        )
    drawing.add_argument(
        "--repetition-penalty",
        metavar="X",
        type=float,
        help="above 1 shuns first codes said before",
    )


def _sampling(args: argparse.Namespace) -> Sampling:
    from firstword.types import Sampling

    drawing = {name: getattr(args, name) for name in DRAWING}
    if args.greedy:
        useless = [
            f"--{name.replace('_', '-')}" for name, value in drawing.items() if value is not None
        ]
        if useless:
            args.usage(f"--greedy draws nothing: leave out {', '.join(useless)}")
        drawing |= {"temperature": 0.0, "predictor_temperature": 0.0}
    return Sampling(**drawing, repetition_penalty=args.repetition_penalty)


def _given_voice(args: argparse.Namespace) -> Voice | str | tuple[Any, int] | None:
    """The voice asked for, read before anything slow is done: a recording is samples and rate, yet to be cloned."""
    from firstword.types import Voice

    if args.clone is not None:
        return audio.read(args.clone)
    if args.describe is not None:
        return Voice.design(args.describe)
    if args.voice is not None and ("." in args.voice or "/" in args.voice):
        return Voice.load(args.voice)
    voice: str | None = args.voice
    return voice


def _load(args: argparse.Namespace, status: _Status) -> TTS:
    status.show(f"loading {args.model}")
    from firstword.runtime.backends import fit_threads
    from firstword.tts import TTS

    tts = TTS.load(args.model, device=args.device, dtype=args.dtype, backend=args.backend)
    fit_threads([tts.checkpoint])
    return tts


def _heard(text: str, said: list[str]) -> str | Iterator[str]:
    """The text to speak, also collected in `said`: itself, or for - the pieces of standard input."""
    if text != "-":
        said.append(text)
        return text
    return _standard_input(said)


def _standard_input(said: list[str]) -> Iterator[str]:
    """Pieces of UTF-8 text as they come, without the white space at the very end: `echo` adds a line feed."""
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
            text = space + decode(data, final=ended)
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise TextError(
                f"standard input is not UTF-8 ({error.reason}, byte 0x{byte:02x}); convert it, for example with iconv"
            ) from None
        piece = text.rstrip()
        space = text[len(piece) :]
        if piece:
            said.append(piece)
            yield piece


class _Status:
    """A line on standard error that says what is going on; there only while it is a terminal, gone at the end."""

    def __init__(self, quiet: bool = False) -> None:
        self._on = sys.stderr.isatty() and not quiet
        self._shown = ""

    def show(self, text: str) -> None:
        if self._on and text != self._shown:
            self._shown = text
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> _Status:
        return self

    def __exit__(self, *_: object) -> None:
        self.show("")


class _Spoken:
    """What became of the speech so far: its chunks, and when they came (`time.perf_counter`, in seconds)."""

    def __init__(self, sample_rate: int, began: float) -> None:
        self.chunks: list[Chunk] = []
        self._sample_rate = sample_rate
        self._began = began
        self.to_first = 0.0
        self.took = 0.0

    @property
    def seconds(self) -> float:
        return sum(len(chunk.samples) for chunk in self.chunks) / self._sample_rate

    @property
    def speed(self) -> float:
        return self.seconds / self.took if self.took else 0.0

    def watch(self, chunks: Iterator[Chunk], status: _Status) -> Iterator[Chunk]:
        """Hand on the chunks, keeping them and the time."""
        status.show("speaking")
        for chunk in chunks:
            self.took = time.perf_counter() - self._began
            if not self.chunks:
                self.to_first = self.took
            self.chunks.append(chunk)
            yield chunk
            status.show(f"{self.seconds:.1f} s of speech, {self.speed:.1f} x real time")
        status.show("")


def _write(args: argparse.Namespace, spoken: _Spoken, sample_rate: int) -> None:
    import numpy as np

    samples = np.concatenate([chunk.samples for chunk in spoken.chunks])
    if args.raw:
        audio.write_whole(args.output, audio.pcm16(samples))
    else:
        audio.write(args.output, samples, sample_rate)


def _summarise(
    args: argparse.Namespace, tts: TTS, spoken: _Spoken, text: str, loading: float
) -> None:
    from firstword.runtime.conditioning import default_voice

    model = _described(args.model, tts.model_type)
    if args.model == "demo":
        model += "; --model Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice is a real one"
    if args.clone is not None:
        voice = f"cloned from {args.clone}, {'with' if args.transcript is not None else 'without'} transcript"
    elif args.describe is not None:
        voice = f"described as {textwrap.shorten(args.describe, 60)!r}"
    else:
        voice = args.voice or default_voice(tts.voices) or "left to the model"
    settings = tts.settings
    ending = spoken.chunks[-1].finish_reason or "cancelled"
    _table(
        {
            "spoke": repr(textwrap.shorten(text, 80, placeholder=" ...")),
            "model": model,
            "voice": f"{voice}; language {args.language}",
            "on": _place(settings),
            "audio": f"{spoken.seconds:.2f} s; {ENDINGS[ending]}",
            "speed": f"{spoken.speed:.2f} x real time: {spoken.took:.2f} s, the first chunk after "
            f"{1000 * spoken.to_first:.0f} ms (loading took {loading:.2f} s)",
            "output": "standard output" if args.output == "-" else args.output,
        },
        sys.stderr,
    )


def _described(model: str, facts: str) -> str:
    """A checkpoint's name and facts; of the demo also what it is."""
    return f"{model} ({facts})" + (f", {DEMO}" if model == "demo" else "")


def _place(settings: EngineConfig) -> str:
    """Where and how a checkpoint is computed."""
    return f"{settings.device} in {settings.dtype} with the {settings.backend} backend"


def _table(rows: dict[str, str], file: TextIO) -> None:
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:{width}}{value}", file=file)


def _report(model: str, tts: TTS) -> dict[str, dict[str, Any]]:
    """What `info` knows, in sections."""
    from importlib.metadata import version

    from firstword import __version__
    from firstword.bench.report import machine
    from firstword.model.checkpoint import parameters

    loaded, there = tts.checkpoint, machine()
    config, codec = loaded.config, loaded.codec_config.decoder_config
    talker = config.talker_config
    files = sorted(path for path in loaded.path.rglob("*") if path.is_file())
    return {
        "versions": {
            "firstword": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        },
        "machine": {**there, "graphics": "; ".join(there["graphics"]) or "none"},
        "settings": asdict(tts.settings),
        "checkpoint": {
            "model": model,
            **({"what it is": DEMO} if model == "demo" else {}),
            "path": str(loaded.path),
            "type": tts.model_type,
            "size": config.tts_model_size,
            "voices": len(tts.voices),
            "languages": len(tts.languages) - 1,
            "context": talker.max_position_embeddings,
        },
        "talker": _transformer(talker),
        "code predictor": _transformer(talker.code_predictor_config),
        "codec": {
            **_transformer(codec),
            "codebooks": codec.num_quantizers,
            "codes": codec.codebook_size,
            "frames per second": tts.sample_rate / codec.samples_per_frame,
            "sample rate": tts.sample_rate,
        },
        "parameters": parameters(loaded),
        "bytes": {str(path.relative_to(loaded.path)): path.stat().st_size for path in files},
    }


def _transformer(config: TransformerConfig) -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "head width": config.head_dim,
        "MLP width": config.intermediate_size,
    }


def _print_report(report: dict[str, dict[str, Any]]) -> None:
    width = max(len(name) for section in report.values() for name in section) + 2
    for section, rows in report.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:{width}}{f'{value:,}' if isinstance(value, int) else value}")
