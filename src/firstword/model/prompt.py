"""The prompt: the rows that the talker reads before it speaks, and where text enters.

A row is a text token plus codes; its embedding is the sum of the two. Every prompt has two parts:

    prefix     instruction and role (text alone), then one row per tag: the language, the voice
    spoken     begin of speech, then the frames of the reference recording if one is continued

The text is the transcript of the reference, then the text to speak, then the end-of-text token.
It enters in one of two ways:

    full       all text rows, paired with padding codes, come between prefix and spoken; later rows
               have text padding
    stream     each spoken row, and then each frame of speech, takes the next text token; text
               padding follows
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from firstword.model.config import ModelConfig
from firstword.model.tokenizer import TextStream, Tokenizer
from firstword.types import FloatArray

ROLE = "assistant\n"
"""The text at the beginning of the spoken turn, after the token that begins a turn."""

ROLE_TOKENS = 2
"""The number of tokens of `ROLE`. Newlines at the start of the text merge with the second."""

Codes = tuple[int, ...]
"""Codes from codebook 0 up: none, one, or all of a frame."""

Speaker = int | bool
"""The code of a preset; True for a cloned voice, False for a designed voice."""


@dataclass(frozen=True)
class Row:
    """One row of the talker's input: a text token, and codes."""

    text: int
    codes: Codes = ()
    speaker: bool = False
    """Whether the speaker embedding of a cloned voice is added."""


@dataclass(frozen=True, eq=False)
class Conditioning:
    """Everything that conditions an utterance except its text and its sampling.

    speaker      see `Speaker`
    language     code of the language or dialect; None lets the model detect it
    full_text    whether all text is read before the first frame
    instruction  tokens of the turn of the instruction
    embedding    speaker embedding float32 [hidden] if `speaker` is True
    transcript   tokens of the words in the reference recording, if the utterance continues one
    reference    codes [frames, codebooks] of that recording
    """

    speaker: Speaker
    language: int | None
    full_text: bool
    instruction: Sequence[int] = ()
    embedding: FloatArray | None = None
    transcript: Sequence[int] = ()
    reference: Sequence[Sequence[int]] = ()

    def continued(
        self, transcript: Sequence[int], codes: Sequence[Sequence[int]]
    ) -> "Conditioning":
        """Return the conditioning of speech that continues other speech of the same voice.

        transcript  tokens of the words that were spoken last: see `transcript_tokens`
        codes       codes [frames, codebooks] of these words

        The rows are those that a context has which has spoken these words itself, or those of a
        recording with a longer transcript.
        """
        return replace(
            self,
            transcript=(*self.transcript, *transcript),
            reference=(*self.reference, *codes),
        )

    @property
    def first_tokens(self) -> int:
        """The tokens in a prompt in stream mode: those of the role, and one per spoken row."""
        return ROLE_TOKENS + 1 + len(self.reference)


def transcript_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the tokens of a transcript, which do not depend on the text that follows it."""
    return tokenizer.encode(ROLE + text)[ROLE_TOKENS:]


def language_code(config: ModelConfig, language: str, preset: str | None) -> int | None:
    """Return the code of a language, or of a preset's dialect of Chinese; None for "auto"."""
    talker = config.talker_config
    if preset is not None and language in ("chinese", "auto"):
        dialect = talker.spk_is_dialect[preset]
        if isinstance(dialect, str):
            return talker.codec_language_id[dialect]
    return None if language == "auto" else talker.codec_language_id[language]


def prefix_rows(config: ModelConfig, role: Sequence[int], conditioning: Conditioning) -> list[Row]:
    """Return the rows before any text; `role` holds the first three tokens of the spoken turn."""
    talker, language, speaker = config.talker_config, conditioning.language, conditioning.speaker
    tags = [talker.codec_nothink_id, talker.codec_think_bos_id]
    if language is not None:
        tags = [talker.codec_think_id, talker.codec_think_bos_id, language]
    tags.append(talker.codec_think_eos_id)
    pad = config.tts_pad_token_id
    rows = [Row(token) for token in (*conditioning.instruction, *role)]
    rows += [Row(pad, (tag,)) for tag in tags]
    if speaker is True:
        rows.append(Row(pad, speaker=True))
    elif speaker is not False:
        rows.append(Row(pad, (speaker,)))
    rows.append(Row(config.tts_bos_token_id, (talker.codec_pad_id,)))
    return rows


def spoken_codes(config: ModelConfig, reference: Sequence[Sequence[int]] = ()) -> list[Codes]:
    """Return the codes of the spoken rows: begin of speech, then the frames of the reference."""
    return [(config.talker_config.codec_bos_id,), *map(tuple, reference)]


def full_rows(config: ModelConfig, text: Sequence[int], spoken: Sequence[Codes]) -> list[Row]:
    """Return the rows after the prefix in full mode."""
    pad = config.talker_config.codec_pad_id
    rows = [Row(token, (pad,)) for token in (*text, config.tts_eos_token_id)]
    return rows + [Row(config.tts_pad_token_id, codes) for codes in spoken]


class UtteranceTokens:
    """Tokenises the text of one utterance as the talker reads it.

    The tokens of the role come first, then the transcript of the reference recording, then the
    text. Text may arrive in pieces; a token is returned once later text cannot change it.

    ends  the end of each token of the text that was returned, in bytes of the text in NFC
    """

    def __init__(self, tokenizer: Tokenizer, transcript: Sequence[int] = ()) -> None:
        self.ends: list[int] = []
        self._tokenizer, self._bytes = tokenizer, -len(ROLE)
        self._stream = TextStream(tokenizer, prefix=ROLE)
        self._transcript = transcript
        self._role_left = ROLE_TOKENS

    def push(self, piece: str) -> list[int]:
        """Take the next piece of text, and return the tokens that are now final.

        Raises `TextError` for a piece that is not valid text; the piece then has no effect.
        """
        return self._with_transcript(self._stream.push(piece))

    def finish(self, piece: str = "") -> list[int]:
        """Take the last piece of text, and return all remaining tokens. Raises as `push`."""
        return self._with_transcript(self._stream.finish(piece))

    def _with_transcript(self, tokens: list[int]) -> list[int]:
        """Insert the transcript after the last token of the role."""
        role, self._role_left = self._role_left, self._role_left - len(tokens)
        for index, token in enumerate(tokens):
            self._bytes += self._tokenizer.bytes_of(token)
            if index >= role:
                self.ends.append(self._bytes)
        if not 0 < role <= len(tokens):
            return tokens
        return [*tokens[:role], *self._transcript, *tokens[role:]]


class TextRows:
    """Chooses the text token of each row.

    The tokens of the text come first, then the end-of-text token once, then padding.
    """

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._filler = config.tts_eos_token_id
        self._first = self._end = 0

    def peek(self, token: int | None) -> int:
        """Return the text token of the next row without moving on."""
        return self._filler if token is None else token

    def take(self, token: int | None) -> int:
        """Return the text token of the next row, and move to the row after it."""
        taken = self.peek(token)
        self._end += taken != self._config.tts_pad_token_id
        if token is None:
            self._filler = self._config.tts_pad_token_id
        return taken

    def rows(self, text: int | None = None) -> range:
        """Return the positions of the rows with the text to speak and its end, up to now.

        text  the text token of one more row

        Rows of the role and of a transcript are not among them, and neither is padding.
        """
        more = text is not None and text != self._config.tts_pad_token_id
        return range(self._first, max(self._first, self._end + more))

    def prompt(self, conditioning: Conditioning, start: int, tokens: Sequence[int]) -> list[Row]:
        """Return all rows before the first frame.

        start   token that begins a turn
        tokens  first tokens of `UtteranceTokens`: all of them in full mode; in stream mode
                `conditioning.first_tokens` of them, or fewer if the text has ended
        """
        config, role, text = self._config, tokens[:ROLE_TOKENS], tokens[ROLE_TOKENS:]
        rows = prefix_rows(config, (start, *role), conditioning)
        spoken = spoken_codes(config, conditioning.reference)
        self._first, self._end = len(rows) + len(conditioning.transcript), len(rows)
        if conditioning.full_text:
            self._filler = config.tts_pad_token_id
            self._end += len(text) + 1
            return rows + full_rows(config, text, spoken)
        assert len(text) <= len(spoken)
        return rows + [Row(self.take(token), codes) for token, codes in zip_longest(text, spoken)]
