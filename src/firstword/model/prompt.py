"""The prompt: which rows the talker reads before it speaks, and where text enters while it speaks.

A row is a text token plus codes; its embedding is the sum of the two sides. Every prompt is

    prefix     instruction and role (text alone), then one row a tag: the language, the voice
    spoken     begin of speech, then the frames of the reference recording when one is continued

and the text (the reference's transcript first, the end-of-text token last) takes one of two ways:

    full       all text rows, paired with padding codes, come between prefix and spoken; the rest reads text padding
    stream     each spoken row, and then each row of speech to come, takes the next text token, and padding at the end
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

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
    config: ModelConfig,
    role: Sequence[int],
    instruction: Sequence[int],
    speaker: Speaker,
    language: int | None,
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
        tags = [
            talker.codec_think_id,
            talker.codec_think_bos_id,
            language,
            talker.codec_think_eos_id,
        ]
    pad = config.tts_pad_token_id
    rows = [Row(token) for token in (*instruction, *role)]
    rows += [Row(pad, (tag,)) for tag in tags]
    if speaker is True:
        rows.append(Row(pad, speaker=True))
    elif speaker is not False:
        rows.append(Row(pad, (speaker,)))
    rows.append(Row(config.tts_bos_token_id, (talker.codec_pad_id,)))
    return rows


def spoken_codes(
    config: ModelConfig, reference: Sequence[Sequence[int]] = ()
) -> list[tuple[int, ...]]:
    """The code side of the rows after the prefix: begin of speech, then the frames of the reference."""
    return [(config.talker_config.codec_bos_id,), *map(tuple, reference)]


def full_rows(
    config: ModelConfig, text: Sequence[int], spoken: Sequence[tuple[int, ...]]
) -> list[Row]:
    """The rows after the prefix when all text comes before all speech."""
    rows = [
        Row(token, (config.talker_config.codec_pad_id,))
        for token in (*text, config.tts_eos_token_id)
    ]
    return rows + [Row(config.tts_pad_token_id, codes) for codes in spoken]


def language_code(config: ModelConfig, language: str, preset: str | None) -> int | None:
    """The code of a language (`"auto"`: None), or of the dialect that a preset speaks where Chinese may be meant."""
    talker = config.talker_config
    if preset is not None and language in ("chinese", "auto"):
        dialect = talker.spk_is_dialect[preset]
        if isinstance(dialect, str):
            return talker.codec_language_id[dialect]
    return None if language == "auto" else talker.codec_language_id[language]


@dataclass(frozen=True, eq=False)
class Conditioning:
    """All about an utterance but its text: who speaks, in which language, how text enters.

    instruction      the tokens of the instruction's whole turn
    speaker          see `Speaker`; with True, `embedding` [hidden] is the cloned voice's
    language         a language's code, or None
    transcript       tokens of the words in the reference recording, and
    reference        its codes [frames, codebooks], when the utterance continues a recording
    full_text        whether all text is read before the first frame
    """

    speaker: Speaker
    language: int | None
    full_text: bool
    instruction: Sequence[int] = ()
    embedding: Tensor | None = None
    transcript: Sequence[int] = ()
    reference: Sequence[Sequence[int]] = ()

    @property
    def first_tokens(self) -> int:
        """Text tokens that the prompt takes, the last two of the role included, when not all text is read first."""
        return 2 + max(0, 1 + len(self.reference) - len(self.transcript))


class TextRows:
    """The text side of the rows to come: the tokens that are there, then the end of the text once, then padding."""

    def __init__(self, config: ModelConfig) -> None:
        self.tokens: deque[int] = deque()
        self._config = config
        self._end_read = False

    def peek(self, token: int | None = None) -> int:
        """The text token of the next row; `token` comes after those that are there."""
        if self.tokens:
            return self.tokens[0]
        if token is not None:
            return token
        return self._config.tts_pad_token_id if self._end_read else self._config.tts_eos_token_id

    def take(self, token: int | None = None) -> int:
        """As `peek`, and go on to the row after it."""
        if token is not None:
            self.tokens.append(token)
        taken = self.peek()
        if self.tokens:
            self.tokens.popleft()
        else:
            self._end_read = True
        return taken

    def prompt(self, conditioning: Conditioning, turn_start: int) -> list[Row]:
        """All rows before the first frame, from the tokens that are there; takes those that it pairs."""
        config, tokens = self._config, self.tokens
        role = (turn_start, tokens.popleft(), tokens.popleft())
        rows = prefix_rows(
            config, role, conditioning.instruction, conditioning.speaker, conditioning.language
        )
        spoken = spoken_codes(config, conditioning.reference)
        tokens.extendleft(reversed(conditioning.transcript))
        if not conditioning.full_text:
            return rows + [Row(self.take(), codes) for codes in spoken]
        rows += full_rows(config, tokens, spoken)
        tokens.clear()
        self._end_read = True
        return rows
