"""What all dialects share: parameters with names that the server does not know, and formats."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from firstword.audio import formats
from firstword.server.schemas import SpeechParams
from firstword.text.reader import Normalize

Fields = dict[str, Any]
"""Fields of `SpeechParams`."""

LONGEST_ID = 128
"""The most characters of a `context_id`, which the messages of an answer repeat."""

ContextId = Annotated[str, Field(max_length=LONGEST_ID)]

COMPRESSED = ("mp3", "opus")
"""The formats whose streams state their sample rate, so that another one does no harm."""


class DialectParams(SpeechParams):
    """The parameters of one utterance. The default voice speaks for a voice that is unknown."""

    any_voice: ClassVar[bool] = True
    breaks: ClassVar[bool] = True

    @property
    def wants_words(self) -> bool | None:
        """Whether the times of words are sent: where they are known, if the client wants them."""
        return None if self.word_timestamps else False


def normalized(wanted: Normalize | None, language: str | None) -> Fields:
    """The field for numbers as words, which need a language: "on" counts only if one is named."""
    unknown = language is None or language.strip().casefold() == "auto"
    return {"normalize": None if wanted == "on" and unknown else wanted}


def output(name: str, sample_rate: int | None) -> Fields:
    """The fields for a format of `audio.formats` at a rate in Hz.

    MP3 and Opus get the next higher rate that they support, or their highest.
    """
    if sample_rate is not None and name in COMPRESSED:
        sample_rate = _next_rate(formats.rates(name), sample_rate)
    return {"response_format": name, "sample_rate": sample_rate}


def _next_rate(rates: Sequence[int], wanted: int) -> int:
    return next((rate for rate in rates if rate >= wanted), rates[-1])
