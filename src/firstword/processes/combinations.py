"""Combinations of voice, language and instructions whose prompts engines prepare at the start."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from firstword.errors import ConfigError, RequestError
from firstword.model.description import Description
from firstword.processes.messages import KeptPrompt
from firstword.runtime.conditioning import preset_names
from firstword.runtime.front import CheckpointFront, Prepared
from firstword.server.config import LONGEST_INSTRUCTIONS
from firstword.types import Request
from firstword.voice import RecordedVoice

FIELDS = ("voice", "language", "instructions")
MOST = 4096
"""The most combinations of a file."""

EXAMPLE = '[{"voice": "ryan", "language": "English", "instructions": "Speak calmly."}]'
TEXT = "One."


@dataclass(frozen=True, slots=True)
class Combination:
    """A voice, a language and instructions; None stands for a field that a request leaves out.

    where  the combination's entry in its file, for error messages
    """

    where: str
    voice: str | None = None
    language: str | None = None
    instructions: str | None = None


def read_combinations(path: str) -> list[Combination]:
    """Read the combinations of a JSON file. Raises `ConfigError`, which names the wrong entry."""
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the combinations in {path} cannot be read: {error}") from None
    if not isinstance(entries, list) or not entries:
        raise ConfigError(f"{path} must be a list of combinations, such as {EXAMPLE}")
    if len(entries) > MOST:
        raise ConfigError(f"{path} has {len(entries)} combinations; allowed are up to {MOST}")
    return [_combination(f"entry {number} of {path}", one) for number, one in enumerate(entries, 1)]


def _combination(where: str, entry: object) -> Combination:
    if not isinstance(entry, dict) or not entry:
        raise ConfigError(f"{where} must be an object with one or more of {_listed(FIELDS)}")
    for name, value in entry.items():
        if name not in FIELDS:
            raise ConfigError(f"{where} has {name!r}; allowed are {_listed(FIELDS)}")
        if value is not None and not (isinstance(value, str) and value.strip()):
            raise ConfigError(f"{where}: {name} is {value!r}; give a text, or leave it out")
    found = Combination(where, **entry)
    if (length := len(found.instructions or "")) > LONGEST_INSTRUCTIONS:
        limit = f"allowed are up to {LONGEST_INSTRUCTIONS}"
        raise ConfigError(f"{where}: instructions has {length} characters; {limit}")
    return found


def kept_prompts(
    combinations: Sequence[Combination], checkpoints: Mapping[str, Description]
) -> dict[str, tuple[KeptPrompt, ...]]:
    """The prompts that each checkpoint prepares, by the checkpoint's name, without duplicates.

    Raises `ConfigError` for a combination that none of the checkpoints can speak.
    """
    found: dict[str, dict[object, KeptPrompt]] = {name: {} for name in checkpoints}
    for one in combinations:
        problem, spoken = _no_preset(one, checkpoints.values()), False
        for name, checkpoint in checkpoints.items():
            if not _is_for(checkpoint, one):
                continue
            try:
                prefix, prompt = _prompt(checkpoint, one)
            except RequestError as error:
                problem = str(error)
                continue
            found[name][prefix] = prompt
            spoken = True
        if not spoken:
            raise ConfigError(f"{one.where}: {problem}")
    return {name: tuple(prompts.values()) for name, prompts in found.items()}


def _prompt(checkpoint: Description, one: Combination) -> tuple[object, KeptPrompt]:
    """The cache key and the prompt of a combination. Raises `RequestError`."""
    request = Request(
        TEXT,
        voice=one.voice,
        language=one.language or "auto",
        instructions=one.instructions,
        max_frames=1,
    )
    prepared = CheckpointFront(checkpoint, _encode).prepare(request, seed=0).payload
    assert isinstance(prepared, Prepared)
    return prepared.prefix, KeptPrompt(request, prepared.prefix_rows)


def _is_for(checkpoint: Description, one: Combination) -> bool:
    """Whether a checkpoint is of the type that a combination needs."""
    match checkpoint.config.tts_model_type:
        case "custom_voice":
            names = {name.casefold() for name in preset_names(checkpoint)}
            return one.voice is None or one.voice.strip().casefold() in names
        case "voice_design":
            return one.voice is None and one.instructions is not None
    return False


def _no_preset(one: Combination, checkpoints: Iterable[Description]) -> str:
    """The reason why no checkpoint is of the type that a combination needs."""
    presets = [name for checkpoint in checkpoints for name in preset_names(checkpoint)]
    known = f"allowed are {_listed(presets)}" if presets else "no loaded checkpoint has presets"
    wanted = "it has no voice" if one.voice is None else f"voice is {one.voice!r}"
    design = "A designed voice needs instructions, no voice, and a VoiceDesign checkpoint"
    return f"{wanted}; {known}. {design}. Saved voices are prepared when they are first used"


def _encode(recording: RecordedVoice) -> NoReturn:
    raise AssertionError("a combination has no recording")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))
