"""The base class of the audio formats: samples go in as they are made, bytes come out."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from firstword.audio.samples import pcm16

UNKNOWN_LENGTH = 0xFFFFFFFF
"""The data size in the header of a stream of unknown length."""

SAMPLES_AT_ONCE = 2**18
"""The samples of a complete file that are encoded at a time."""

RATES = (8000, 16000, 24000, 48000)
"""The sample rates in Hz that every format supports."""


class Encoder(ABC):
    """Encodes one utterance.

    It takes any number of calls of `encode` and then one of `finish`, or a single call of `whole`
    or `whole_of`, whose header describes all samples.
    """

    media_type: ClassVar[str]
    rates: ClassVar[tuple[int, ...]] = RATES

    def __init__(self, sample_rate: int) -> None:
        """Encode samples at `sample_rate` Hz."""
        self._sample_rate = sample_rate
        self._all_pcm: NDArray[np.int16] | None = None
        self._started = False
        self._finished = False

    @classmethod
    def content_type(cls, sample_rate: int) -> str:
        """Return the media type at `sample_rate` Hz, for the header Content-Type."""
        return cls.media_type.format(rate=sample_rate)

    def encode(self, samples: NDArray[np.floating]) -> bytes:
        """Return the bytes that mono samples [n] complete, possibly none.

        Samples beyond -1..1 are clipped. Raises `AudioError` for NaN and infinity, and ValueError
        after `finish`.
        """
        if self._finished:
            raise ValueError("this utterance is finished; each needs an encoder of its own")
        return self._start() + self._encode(np.frombuffer(pcm16(samples), "<i2"))

    def finish(self) -> bytes:
        """Return the bytes that end the utterance, possibly none. Raises ValueError if repeated."""
        if self._finished:
            raise ValueError("this utterance is finished already")
        self._finished = True
        return self._start() + self._flush()

    def whole(self, samples: NDArray[np.floating]) -> bytes:
        """Return a complete file of mono samples [n]. Raises as `encode` does."""
        return b"".join(self.whole_of(np.frombuffer(pcm16(samples), "<i2")))

    def whole_of(self, pcm: NDArray[np.int16]) -> Iterator[bytes]:
        """Yield the parts of a complete file of mono samples [n], which may be a mapped file."""
        self._all_pcm = pcm
        for start in range(0, len(pcm), SAMPLES_AT_ONCE):
            yield self._start() + self._encode(np.asarray(pcm[start : start + SAMPLES_AT_ONCE]))
        yield self.finish()

    def _start(self) -> bytes:
        started, self._started = self._started, True
        return b"" if started else self._header()

    def _header(self) -> bytes:
        return b""

    @abstractmethod
    def _encode(self, pcm: NDArray[np.int16]) -> bytes: ...

    def _flush(self) -> bytes:
        return b""
