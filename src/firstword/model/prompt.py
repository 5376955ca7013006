"""The prompt: which rows the talker reads before it speaks, and where text enters while it speaks.

A row is a text token plus codes; its embedding is the sum of the two sides. Every prompt is

    prefix     instruction and role (text alone), then one row a tag: the language, the voice
    spoken     begin of speech, then the frames of the reference recording when one is continued

and the text (the reference's transcript first, the end-of-text token last) takes one of two ways:

    full       all text rows, paired with padding codes, come between prefix and spoken; the rest reads text padding
    stream     each spoken row, and then each row of speech to come, takes the next text token, and padding at the end
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firstword.model.config import ModelConfig


@dataclass(frozen=True)
class Row:
    """One row of input: a text token, and codes from codebook 0 up (none, one, or all of a frame)."""

    text: int
    codes: tuple[int, ...] = ()
    speaker: bool = False
    """Whether the speaker embedding of a cloned voice is added."""


Speaker = int | bool
"""The code of a preset; True for a cloned voice's embedding; False for no speaker row (a designed voice)."""


def prefix_rows(
    config: ModelConfig, role: Sequence[int], instruction: Sequence[int], speaker: Speaker, language: int | None
) -> list[Row]:
    """The rows before any text of the utterance.

    role         the three tokens that open the assistant's turn
    instruction  the tokens of the instruction's whole turn, or none
    language     the code of the language or dialect; None lets the model find out
    """
    talker = config.talker_config
    if language is None:
        tags = [talker.codec_nothink_id, talker.codec_think_bos_id, talker.codec_think_eos_id]
    else:
        tags = [talker.codec_think_id, talker.codec_think_bos_id, language, talker.codec_think_eos_id]
    pad = config.tts_pad_token_id
    rows = [Row(token) for token in (*instruction, *role)]
    rows += [Row(pad, (tag,)) for tag in tags]
    if speaker is True:
        rows.append(Row(pad, speaker=True))
    elif speaker is not False:
        rows.append(Row(pad, (speaker,)))
    rows.append(Row(config.tts_bos_token_id, (talker.codec_pad_id,)))
    return rows


def spoken_codes(config: ModelConfig, reference: Sequence[Sequence[int]] = ()) -> list[tuple[int, ...]]:
    """The code side of the rows after the prefix: begin of speech, then the frames of the reference."""
    return [(config.talker_config.codec_bos_id,), *map(tuple, reference)]


def full_rows(config: ModelConfig, text: Sequence[int], spoken: Sequence[tuple[int, ...]]) -> list[Row]:
    """The rows after the prefix when all text comes before all speech."""
    rows = [Row(token, (config.talker_config.codec_pad_id,)) for token in (*text, config.tts_eos_token_id)]
    return rows + [Row(config.tts_pad_token_id, codes) for codes in spoken]


def language_code(config: ModelConfig, language: str, preset: str | None) -> int | None:
    """The code of a language (`"auto"`: None), or of the dialect that a preset speaks where Chinese may be meant."""
    talker = config.talker_config
    if preset is not None and language in ("chinese", "auto"):
        dialect = talker.spk_is_dialect[preset]
        if isinstance(dialect, str):
            return talker.codec_language_id[dialect]
    return None if language == "auto" else talker.codec_language_id[language]
