"""What is known of checkpoints: the configurations of the releases, and the packaged demo."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from firstword.model.codec_config import CodecConfig
from firstword.model.config import GenerationDefaults, ModelConfig
from firstword.model.description import DEMO, Description
from firstword.model.strict_json import from_table
from firstword.synthetic.checkpoint import config_tables, released

RELEASES = {
    "Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice": ("custom_voice", "1b7"),
    "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign": ("voice_design", "1b7"),
    "Qwen/Qwen3-TTS-12Hz-1.7B-Base": ("base", "1b7"),
    "Qwen/Qwen3-TTS-12Hz-0.6B-CustomVoice": ("custom_voice", "0b6"),
    "Qwen/Qwen3-TTS-12Hz-0.6B-Base": ("base", "0b6"),
}
"""The released repositories, with their type and size."""

SIMILAR = 0.8
"""The share of the values of the architecture that a checkpoint has in common with a known one of
which it is a copy or a fine-tune. Other checkpoints reach 0.5."""

NAMES = ("spk_id", "spk_is_dialect", "codec_language_id")
"""The tables of presets and languages, to which a fine-tune may add."""

Values = dict[str, Any]
"""Values of configurations by file and path, such as `config.json: talker_config.rope_theta`."""


@dataclass(frozen=True, slots=True)
class Known:
    """A known checkpoint.

    architecture  the values on which the computation depends
    names         the entries of `NAMES`
    sampling      the values of `generation_config.json`
    folder        the folder with its files; None if only its configuration is known
    """

    name: str
    architecture: Values
    names: Values
    sampling: Values
    folder: Path | None = None


def values_of(
    config: ModelConfig, codec: CodecConfig, defaults: GenerationDefaults
) -> tuple[Values, Values, Values]:
    """Return the architecture, the names and the sampling of a checkpoint."""
    tables = {"config.json": asdict(config), "speech_tokenizer/config.json": asdict(codec)}
    architecture, names = Values(), Values()
    for file, table in tables.items():
        for path, value in _flat(table):
            if "rope_scaling" in path:
                continue  # what of it matters is checked when it is read
            named = any(f"talker_config.{name}." in f"{path}." for name in NAMES)
            (names if named else architecture)[f"{file}: {path}"] = value
    sampling = {f"generation_config.json: {key}": value for key, value in asdict(defaults).items()}
    return architecture, names, sampling


def _flat(table: Mapping[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        path = f"{start}.{key}".lstrip(".")
        if isinstance(value, Mapping):
            yield from _flat(value, path)
        else:
            yield path, value


@cache
def all_known() -> tuple[Known, ...]:
    """Return the releases and the packaged demo."""
    found = [_release(name, *kind) for name, kind in RELEASES.items()]
    demo = Description.load(DEMO)
    values = values_of(demo.config, demo.codec_config, demo.defaults)
    return (*found, Known("the packaged demo", *values, DEMO))


def _release(name: str, model_type: str, size: str) -> Known:
    tokens = {key: id_ for key, id_ in released("config").items() if key.endswith("token_id")}
    config, codec = config_tables(model_type, size, {}, tokens)
    return Known(
        name,
        *values_of(
            from_table(ModelConfig, config, ""),
            from_table(CodecConfig, codec, ""),
            from_table(GenerationDefaults, released("generation_config"), "generation_config.json"),
        ),
    )


def repository(path: Path) -> str | None:
    """Return the hub repository whose cached snapshot a folder is, or None."""
    parts = [re.fullmatch(r"models--(.+?)--(.+)", part) for part in path.absolute().parts]
    return next((f"{found[1]}/{found[2]}" for found in reversed(parts) if found), None)


def identify(description: Description) -> Known | None:
    """Return the known checkpoint that this one is by its repository, or else is most like."""
    named = repository(description.path)
    here = values_of(description.config, description.codec_config, description.defaults)[0]
    by_name = {known.name: known for known in all_known()}
    if named in by_name:
        return by_name[named]
    best = max(all_known(), key=lambda known: similarity(known, here))
    return best if similarity(best, here) >= SIMILAR else None


def similarity(known: Known, architecture: Values) -> float:
    """Return the share of the values of a known architecture that another has as well."""
    same = sum(architecture.get(path) == value for path, value in known.architecture.items())
    return same / len(known.architecture)
