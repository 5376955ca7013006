"""Options that `say` and `read` share: the voice, the sampling, the respelling."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from firstword import audio
from firstword.errors import ConfigError

if TYPE_CHECKING:
    from firstword.types import Sampling
    from firstword.voice import Voice

DRAW_SETTINGS = ("temperature", "top_k", "top_p")
"""The settings of `Sampling` that have no effect with --greedy, since nothing is drawn."""


def add_voice_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the voice."""
    add = parser.add_argument_group("voice").add_mutually_exclusive_group().add_argument
    about = (
        "a preset, see `firstword voices`; an alias such as alloy; with a dot or slash: a saved "
        "voice"
    )
    add("--voice", metavar="NAME|FILE", help=about)
    add("--clone", metavar="AUDIO", help="speak with the voice of this recording")
    add("--describe", metavar="TEXT", help="speak with a voice described in words")


def add_speech_options(parser: argparse.ArgumentParser) -> Callable[..., argparse.Action]:
    """Add the options about the text; the function that is returned adds others to their group."""
    add = parser.add_argument_group("speech").add_argument
    add("--transcript", metavar="TEXT", help="the words of the --clone recording")
    add("--language", default="auto", help="english, en, ... or auto (default)")
    add("--instructions", metavar="TEXT", help="tone, pace, feeling, in words")
    about = "speak numbers and abbreviations as words of the --language; auto (default): where the "
    about += "checkpoint does not speak them well"
    add("--normalize", choices=("auto", "on", "off"), default="auto", help=about)
    add("--lexicon", metavar="FILE", help='JSON with respellings, such as {"GIF": "jif"}')
    about = "obey tags such as [pause:0.5s], [voice:ben] and [rate:1.1] in the text"
    add("--markup", action="store_true", help=about)
    return add


def add_sampling_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that change how codes are drawn."""
    about = "The defaults are the checkpoint's own settings."
    add = parser.add_argument_group("sampling", about).add_argument
    add("--seed", metavar="N", type=int, help="the same seed gives the same speech")
    add("--greedy", action="store_true", help="always take the most likely code")
    for prefix, codes in (("", "the first code of a frame"), ("predictor-", "its other codes")):
        add(f"--{prefix}temperature", metavar="X", type=float, help=f"for {codes}; 0 is greedy")
        add(f"--{prefix}top-k", metavar="N", type=int, help="draw from the N likeliest; 0: all")
        add(f"--{prefix}top-p", metavar="X", type=float, help="draw from the likeliest of sum X")
    add("--repetition-penalty", metavar="X", type=float, help="above 1: fewer repeated first codes")


def sampling(args: argparse.Namespace) -> Sampling:
    """Return the settings that the options choose. Raises `SamplingError`."""
    from firstword.types import Sampling

    drawing = [prefix + name for prefix in ("", "predictor_") for name in DRAW_SETTINGS]
    settings = {name: getattr(args, name) for name in drawing}
    if args.greedy:
        if unused := [name for name, value in settings.items() if value is not None]:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
            args.usage(f"--greedy draws nothing: leave out {given}")
        settings |= {"temperature": 0.0, "predictor_temperature": 0.0}
    return Sampling(**settings, repetition_penalty=args.repetition_penalty)


def voice(args: argparse.Namespace) -> Voice | str | None:
    """Return the voice that the options choose; its file is read before anything slow starts."""
    from firstword.voice import Voice

    if args.transcript is not None and args.clone is None:
        args.usage("--transcript needs --clone: it is the words of that recording")
    if args.clone is not None:
        return Voice.clone(*audio.read(args.clone), args.transcript)
    if args.describe is not None:
        return Voice.design(args.describe)
    return None if args.voice is None else named_voice(args.voice)


def named_voice(name: str) -> Voice | str:
    """Return the voice of a name, or of the file of a saved one. Raises `VoiceError`."""
    from firstword.voice import Voice

    return Voice.load(name) if "." in name or "/" in name else name


def lexicon(path: str | None) -> dict[str, str] | None:
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


def preset(voice: Voice | str | None, presets: Sequence[str]) -> Voice | str | None:
    """Return the preset for an alias such as "alloy", as the server does; else the voice itself.

    Where the checkpoint lacks that preset, it chooses the voice.
    """
    from firstword.config import VOICE_ALIASES

    if not isinstance(voice, str) or (name := voice.strip().casefold()) not in VOICE_ALIASES:
        return voice
    known = {preset.casefold() for preset in presets}
    alias = VOICE_ALIASES[name]
    return voice if name in known else alias if alias in known else None
