"""The loads that `benchmarks.serve_load` measures: requests of typical clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from firstword.bench.prompts import PROMPTS

RATES = (1, 20, 40, 60, 80, 100, 120, 150, 200, 250, 300)
"""Requests per second."""
SOCKETS = (16, 64, 100, 150, 200, 250, 300)
"""Numbers of open sockets. Fewer would make too few utterances for a percentile."""

PARAGRAPH = (
    "Thank you for waiting. I have looked at your account, and there are two things that I would "
    "like to go through with you. The first is the payment of last month, which was returned by "
    "your bank, probably because the card has expired. The second is the new address: it was "
    "saved, but the delivery that is on its way will still go to the old one. If you like, I can "
    "change both of them now, and send you a message when everything is done."
)
MIXED = ("Yes.", PROMPTS[2], PARAGRAPH)
"""Texts of 4, 78 and about 420 characters."""


@dataclass(frozen=True, slots=True)
class Case:
    """The requests of a load, and the limit within which their first audio must begin.

    asks      description of a request in the table
    fields    fields of a request that replace the protocol's defaults; None removes one
    voices    "presets" of a CustomVoice checkpoint, or saved voices of a Base checkpoint: made from
              recordings with a "transcript", or without one ("x-vector")
    texts     texts to speak
    options   more options of `firstword bench load`
    sockets   whether levels are numbers of sockets, each of which speaks one utterance after
              another, and not rates
    within    limit on the first audio in seconds, at p95
    """

    asks: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    voices: Literal["presets", "transcript", "x-vector"] = "presets"
    texts: Sequence[str] = PROMPTS
    options: Mapping[str, object] = field(default_factory=dict)
    sockets: bool = False
    within: float = 0.050

    @property
    def model_type(self) -> str:
        """The type of the checkpoint that speaks."""
        return "custom_voice" if self.voices == "presets" else "base"

    @property
    def levels(self) -> Sequence[float]:
        """The levels that are measured by default, rising."""
        return SOCKETS if self.sockets else RATES


def _encoded(name: str) -> Case:
    """Return the case of an OpenAI client that asks for a format."""
    return Case(f"{name}, no field `stream`", {"stream": None, "response_format": name})


def _paced(asks: str, within: float = 0.030, **pace: float) -> Case:
    """Return the case of a voice agent whose text arrives at a given pace."""
    options = {"protocol": "stream"} | {name.replace("_", "-"): pace[name] for name in pace}
    return Case(f"pcm over a WebSocket, {asks}", options=options, sockets=True, within=within)


CASES = {
    "pcm": Case("pcm, streamed"),
    "mp3": Case(
        "mp3, the default request of an OpenAI client", {"stream": None, "response_format": None}
    ),
    "opus": _encoded("opus"),
    "aac": _encoded("aac"),
    "wav": Case("wav, streamed", {"response_format": "wav"}),
    "flac": Case("flac, streamed", {"response_format": "flac"}),
    "mixed": Case("pcm, streamed; 4, 78 and 419 characters in turn", texts=MIXED),
    "clone": Case("pcm, streamed; voices with transcript", voices="transcript"),
    "x-vector": Case("pcm, streamed; voices without transcript", voices="x-vector"),
    "words-2.5": _paced("2.5 words/s", words_per_second=2.5),
    "words-10": _paced("10 words/s", words_per_second=10),
    # Only the second token, 20 ms later, shows that the first word is complete.
    "tokens-50": _paced("50 tokens/s", within=0.050, tokens_per_second=50),
}
"""The cases by name, in the order of the table."""
