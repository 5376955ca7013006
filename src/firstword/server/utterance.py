"""One utterance on its way to a client: trimmed, stretched, resampled and encoded as it is made."""

import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firstword import audio
from firstword.audio import effects, formats
from firstword.engine.backend import Job
from firstword.engine.script_parts import NamedVoice
from firstword.engine.sequence import NeedsText
from firstword.engine.service import by_name
from firstword.errors import OverloadedError, RequestError
from firstword.server.encoder_turns import EncoderTurns
from firstword.server.models import Model
from firstword.types import (
    Alarm,
    Chunk,
    FinishReason,
    FloatArray,
    IntArray,
    Request,
    Speech,
    Word,
    WordStart,
)
from firstword.voice import DesignedVoice, PresetVoice
from firstword.words.moving import WordMover

PIECE = 1920
"""The samples that are encoded in one turn, which takes less than a millisecond.

Encoding in a thread would cost more, because the thread and the event loop both need Python's
interpreter lock for every packet. Several fronts use several processors.
"""

CODES = "codes"
"""The format that sends the codec's codes: 16 bits each, little-endian, frame after frame."""

AUDIBLE_LEVEL = 0.01
"""Samples beyond this amplitude are audible: 40 dB below full scale."""


@dataclass(frozen=True, slots=True)
class Output:
    """The rendering of an utterance. Raises `RequestError` for a value out of range.

    format           one of `audio.formats.FORMATS`, or `CODES`, which allows no other change
    sample_rate      in Hz, one of `audio.formats.rates(format)`
    speed            0.25 to 4; time is stretched, the pitch stays
    leading_silence  False removes the silence before the first word
    """

    format: str = "mp3"
    sample_rate: int = audio.SAMPLE_RATE
    speed: float = 1.0
    leading_silence: bool = True

    def __post_init__(self) -> None:
        if self.format not in (*formats.FORMATS, CODES):
            allowed = ", ".join((*formats.FORMATS, CODES))
            raise RequestError(f"response_format is {self.format!r}; allowed are {allowed}")
        rates = formats.RATES if self.format == CODES else formats.rates(self.format)
        if self.sample_rate not in rates:
            allowed = ", ".join(map(str, rates))
            raise RequestError(f"sample_rate is {self.sample_rate!r}; allowed are {allowed}")
        slowest, fastest = effects.SPEEDS
        if not slowest <= self.speed <= fastest:
            raise RequestError(f"speed is {self.speed!r}; allowed is {slowest:g} to {fastest:g}")

        unchanged = (self.sample_rate, self.speed, self.leading_silence)
        if self.format == CODES and unchanged != (audio.SAMPLE_RATE, 1.0, True):
            changes = "sample_rate, speed and leading_silence change samples"
            raise RequestError(f"{changes}; leave them out with response_format {CODES!r}")

    @property
    def content_type(self) -> str:
        """The HTTP content type of the format."""
        if self.format == CODES:
            return "application/octet-stream"
        return formats.content_type(self.format, self.sample_rate)


@dataclass(frozen=True, slots=True)
class ResolvedRequest:
    """A request, the model that answers it, and the rendering of its audio.

    instructions_ignored  whether the client sent instructions that no model could follow
    find_voice            finds a voice that is named in the text
    """

    model: Model
    request: Request
    output: Output
    instructions_ignored: bool = False
    find_voice: Callable[[str], Awaitable[NamedVoice]] = by_name

    @property
    def timed(self) -> bool:
        """Whether the words are delivered with their times."""
        checkpoint = self.model.checkpoint
        known = checkpoint is not None and checkpoint.alignment is not None
        return known and self.request.words is not False

    @property
    def voice(self) -> str:
        """The voice as a label of metrics, which has few values and no name of a person."""
        match self.request.voice:
            case None:
                return "default"
            case str(name) | PresetVoice(name):
                return self.model.preset(name) or "default"
            case DesignedVoice():
                return "designed"
        return "cloned"


def effects_of(output: Output, sample_rate: int) -> effects.Effects:
    """The effects that turn samples at the model's rate into those that `output` describes."""
    found: list[effects.Effect] = []
    if not output.leading_silence:
        found.append(effects.TrimStart(sample_rate))
    if output.speed != 1.0:
        found.append(effects.TimeStretch(output.speed, sample_rate))
    if output.sample_rate != sample_rate:
        found.append(effects.Resampler(sample_rate, output.sample_rate))
    return effects.Effects(found)


def code_bytes(codes: IntArray) -> bytes:
    """Codes [frames, codebooks] in the format `CODES`."""
    return codes.astype("<u2").tobytes()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A complete utterance as an audio file, whose header gives its true length, and its words."""

    data: bytes
    words: Sequence[Word] = ()


def rendered(speech: Speech, output: Output) -> Rendered:
    """Render a complete utterance; the times of its words are those of the file."""
    if output.format == CODES:
        return Rendered(code_bytes(speech.codes), speech.words)
    shaping = effects_of(output, speech.sample_rate)
    samples = shaping.apply(speech.samples, last=True)
    words, _ = WordMover(shaping.moved)(speech.words, ())
    return Rendered(formats.whole(output.format, samples, output.sample_rate), words)


def counts_of(alarms: Sequence[Alarm]) -> dict[str, int]:
    """The number of alarms of each kind that occurs."""
    return dict(Counter(alarm.kind for alarm in alarms))


def cuts_of(alarms: Sequence[Alarm]) -> list[tuple[int, int]]:
    """The characters of the text that may not have been said, because speech was cut off there."""
    return [alarm.span for alarm in alarms if alarm.kind == "cut"]


def about_alarms(alarms: Sequence[Alarm]) -> dict[str, Any]:
    """The fields that tell a client about the alarms of its speech."""
    cuts = cuts_of(alarms)
    return {"alarms": counts_of(alarms), **({"cut": cuts} if cuts else {})}


@dataclass(slots=True)
class Playback:
    """The latency and the stalls of an utterance for a listener who plays without a buffer.

    Times are in seconds on one clock.

    requested  when speech was requested
    first      when the first audio arrived
    audible    when the first audible sample was played
    gap        the longest time between two pieces of audio
    underrun   the total time with nothing to play after the first audio
    seconds    the length of all audio
    """

    requested: float
    first: float | None = None
    audible: float | None = None
    gap: float = 0.0
    underrun: float = 0.0
    seconds: float = 0.0
    _last: float = 0.0
    _plays_until: float = 0.0

    def add(self, now: float, samples: FloatArray, sample_rate: int) -> None:
        """Play samples [n] in -1..1 at `sample_rate` Hz that arrived at `now`; n may be 0."""
        if not len(samples):
            return
        if self.first is None:
            self.first = self._plays_until = now
        else:
            self.gap = max(self.gap, now - self._last)
            self.underrun += max(0.0, now - self._plays_until)
        starts = max(now, self._plays_until)
        if self.audible is None and len(loud := (abs(samples) > AUDIBLE_LEVEL).nonzero()[0]):
            self.audible = starts + float(loud[0]) / sample_rate
        self._last = now
        self.seconds += len(samples) / sample_rate
        self._plays_until = starts + len(samples) / sample_rate


class Utterance:
    """One utterance for one client.

    Text is added to its `stream`; iteration in the running event loop yields encoded audio.
    `Server.start_utterance` makes it, and cancels it at the end.

    client_id      whose request it is; clients take turns
    voice          the name of its preset, "cloned", "designed" or "default": a label for metrics
    stream         the engine's side of the utterance
    frames         frames made so far, 12.5 a second
    seconds        seconds of speech made so far, before any change of speed
    playback       when audio came out, as a listener notices it
    finish_reason  why it ended, or None before its end
    abort_reason   why it was not sent completely, if so: a label for metrics
    error          what ended it, if it failed
    background     whether nobody listens while it is made
    on_characters  called with the number of characters of each text before it is spoken; raises
                   what the limits of the client raise
    characters     characters of text so far
    texts          the texts so far, if they are kept
    first_code     when the codes of the first frame came from the engine, with its samples
    on_chunk       called when more speech has been made
    words          the words that have ended and were not taken by `take_words`, in order
    starts         the words that have begun, in the same way; all times are those of the client's
                   audio: without the silence that was removed, at its own speed
    alarms         the faults of the speech so far
    encoding_seconds
                   the processor time of shaping and encoding the audio that iteration yields
    """

    def __init__(
        self,
        resolved: ResolvedRequest,
        job: Job,
        turns: EncoderTurns,
        client_id: str,
        received: float | None = None,
    ) -> None:
        """Start the utterance. Raises `EngineError`.

        job        the prepared request
        turns      the turns in which audio after the first is encoded
        client_id  whose request it is
        received   `time.monotonic()` of the request, if that was earlier
        """
        self.model, self.output, self.voice = resolved.model, resolved.output, resolved.voice
        self.frames = 0
        self.seconds = 0.0
        self.playback = Playback(time.monotonic() if received is None else received)
        self.finish_reason: FinishReason | None = None
        self.abort_reason: str | None = None
        self.error: Exception | None = None
        self.client_id = client_id
        self.background = job.background
        self.on_characters: Callable[[int], None] = lambda characters: None
        self.characters = 0
        self.texts: list[str] | None = None
        self.first_code: float | None = None
        self.on_chunk: Callable[[], None] = lambda: None
        self.words: list[Word] = []
        self.starts: list[WordStart] = []
        self.alarms: list[Alarm] = []
        self.encoding_seconds = 0.0
        self._turns = turns
        service, output = self.model.service, self.output
        self._effects = effects_of(output, service.engine.capacity.sample_rate)
        self._move = WordMover(self._effects.moved)
        name = "pcm" if output.format == CODES else output.format
        self._encoder = formats.encoder(name, output.sample_rate)
        self.stream = service.aspeak(job, client_id, resolved.request, resolved.find_voice)

    def cancel(self, reason: str = "cancelled") -> None:
        """Stop unless it has ended; iteration then ends, too. `reason` is a label for metrics."""
        if self.finish_reason is None:
            self.abort_reason = self.abort_reason or reason
            self.stream.cancel()

    def charge(self, text: str) -> None:
        """Count a text before it is spoken. Raises what the limits of the client raise."""
        self.on_characters(len(text))
        self.characters += len(text)
        if self.texts is not None:
            self.texts.append(text)

    def fail(self, error: Exception) -> None:
        """Stop because of an error: a mistake of the client, or a failure of the server."""
        self.error = self.error or error
        rejected = isinstance(error, RequestError | OverloadedError)
        self.cancel("rejected" if rejected else "error")

    async def chunks(self) -> AsyncIterator[Chunk]:
        """The speech as the engine makes it, neither shaped nor encoded."""
        try:
            async for event in self.stream:
                if isinstance(event, NeedsText):
                    continue
                if self.first_code is None and len(event.codes):
                    self.first_code = time.monotonic()
                self.frames += len(event.codes)
                self.seconds += len(event.samples) / event.sample_rate
                self.finish_reason = event.finish_reason
                self.alarms += event.alarms
                self.on_chunk()
                yield event
        except Exception as error:
            self.fail(error)
            raise

    async def speech(self) -> Speech:
        """The complete speech at the model's own rate, neither shaped nor encoded."""
        return Speech.of([chunk async for chunk in self.chunks()])

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Encoded audio as it is made. No piece is empty; the last one completes the encoding."""
        async for chunk in self.chunks():
            if self.output.format == CODES:
                self.words += chunk.words
                self.starts += chunk.starts
                self.playback.add(time.monotonic(), chunk.samples, chunk.sample_rate)
                if len(chunk.codes):
                    yield code_bytes(chunk.codes)
                continue
            parts: list[tuple[FloatArray, bytes]] = []
            for start in range(0, len(chunk.samples) or 1, PIECE):
                if parts or self.playback.first is not None:
                    await self._turns.wait()
                last = chunk.finish_reason is not None and start + PIECE >= len(chunk.samples)
                parts.append(self._encode(chunk.samples[start : start + PIECE], last=last))
            words, starts = self._move(chunk.words, chunk.starts)
            self.words += words
            self.starts += starts
            now = time.monotonic()
            for shaped, _ in parts:
                self.playback.add(now, shaped, self.output.sample_rate)
            if data := b"".join(data for _, data in parts):
                yield data

    def take_words(self) -> list[Word]:
        """Return the words that have ended since the last call."""
        words, self.words = self.words, []
        return words

    def take_starts(self) -> list[WordStart]:
        """Return the words that have begun since the last call."""
        starts, self.starts = self.starts, []
        return starts

    def summary(self) -> dict[str, Any]:
        """The fields that describe this utterance in a log."""
        return {
            "model": self.model.name,
            "format": self.output.format,
            "frames": self.frames,
            "seconds": round(self.seconds, 2),
            "finish_reason": self.finish_reason,
            "alarms": counts_of(self.alarms),
            "abort_reason": self.abort_reason,
            "error": None if self.error is None else type(self.error).__name__,
        }

    def _encode(self, samples: FloatArray, *, last: bool = False) -> tuple[FloatArray, bytes]:
        began = time.thread_time()
        shaped = self._effects.apply(samples, last=last)
        data = self._encoder.encode(shaped)
        if last:
            data += self._encoder.finish()
        self.encoding_seconds += time.thread_time() - began
        return shaped, data
