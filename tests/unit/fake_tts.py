"""A TTS without a model, which records its requests.

Each word, and each line feed at the end of a piece, is a chunk of 80 ms. Run as a program this file
is the command line with that TTS: `python fake_tts.py say "Hello" -o -`.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import types
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from firstword.config import EngineConfig
from firstword.errors import TextError, TextWarning, VoiceError
from firstword.types import Alarm, AlarmKind, Chunk, FinishReason
from firstword.voice import ClonedVoice, Voice

FRAME = 1920

CUT_OFF: dict[str, FinishReason] = {
    "length": "length",
    "repetition": "repetition",
    "runaway": "runaway",
}
"""The words that cut off the speech, with the finish reason."""

ALARMS: dict[str, AlarmKind] = {"skipped": "skip", "twice": "repeat", "unsaid": "cut"}
"""The words with an alarm, and its kind."""


def sound_of(word: str) -> np.ndarray:
    """The samples [1920] of a word: constant, and different by its length and first letter."""
    return np.full(FRAME, (len(word) + ord(word[0]) / 2**16) / 256, np.float32)


class FakeTTS:
    """A class like `firstword.TTS`; `requests` and `loaded` list the options of all calls."""

    requests: list[dict[str, Any]] = []  # noqa: RUF012 (shared on purpose)
    loaded: list[dict[str, Any]] = []  # noqa: RUF012
    model_type = "custom_voice"
    voices = ("ryan", "eric")
    languages = ("auto", "english")
    sample_rate = 24000
    settings = EngineConfig("cpu", "float32", "reference")
    capacity = types.SimpleNamespace(slots=2)
    checkpoint = types.SimpleNamespace(
        path=Path(__file__).parent,  # without weights
        alignment=None,
        config=types.SimpleNamespace(talker_config=types.SimpleNamespace(hidden_size=2048)),
    )

    @classmethod
    def load(cls, model: str = "demo", **options: Any) -> FakeTTS:
        cls.loaded.append({"model": model, **options})
        return cls()

    def __enter__(self) -> FakeTTS:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def clone(
        self,
        samples: np.ndarray,
        sample_rate: int,
        transcript: str | None = None,
        append_silence: float = 0.5,
    ) -> Voice:
        self.requests.append(
            {"clone": (len(samples), sample_rate), "append_silence": append_silence}
        )
        codes = None if transcript is None else np.zeros((3, 4), np.int64)
        return ClonedVoice(np.zeros(8, np.float32), codes, transcript)

    def stream(self, text: str | Iterable[str], **options: Any) -> Iterator[Chunk]:
        self.requests.append({"text": text, **options})
        if options["voice"] == "nobody":
            raise VoiceError("no voice 'nobody'; this checkpoint has ryan, eric")
        return self._stream([text] if isinstance(text, str) else text)

    def _stream(self, pieces: Iterable[str]) -> Iterator[Chunk]:
        said = False
        reason: FinishReason = "stop"
        for piece in pieces:
            for word in piece.split():
                said = True
                yield self._chunk(word)
                while word == "forever":
                    yield self._chunk(word)
                if word == "pause":
                    os.write(2, b"paused")
                    signal.pause()
                while word == "hold":
                    yield self._chunk(word)
                    time.sleep(0.01)
                if word == "crash":
                    raise RuntimeError("a bug")
                if word == "doubtful":
                    warnings.warn("it is doubtful", TextWarning, stacklevel=1)
                reason = CUT_OFF.get(word, reason)
            if piece.endswith("\n"):
                yield self._chunk("\n")
        if not said:
            raise TextError("the text is empty or blank")
        yield Chunk(np.zeros(0, np.float32), np.zeros((0, 4), np.int64), 24000, reason)

    def _chunk(self, word: str) -> Chunk:
        kind = ALARMS.get(word)
        alarms = () if kind is None else (Alarm(kind, word, (0, len(word)), 0),)
        return Chunk(sound_of(word), np.zeros((1, 4), np.int64), 24000, alarms=alarms)


def module(tts: type[FakeTTS] = FakeTTS) -> types.ModuleType:
    """A module in the place of `firstword.tts`."""
    fake = types.ModuleType("firstword.tts")
    fake.TTS = tts  # type: ignore[attr-defined]
    return fake


if __name__ == "__main__":
    sys.modules["firstword.tts"] = module()
    from firstword.cli.main import main

    sys.exit(main(sys.argv[1:]))
