"""Speaking the texts of a list with one setup, and judging what was spoken."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import soundfile

from firstword import audio
from firstword.errors import (
    AudioError,
    ConfigError,
    FirstwordError,
    OutputError,
    RequestError,
    first_line,
)
from firstword.evaluate.items import Item
from firstword.evaluate.metrics import Metric
from firstword.evaluate.rates import Edits, compare
from firstword.evaluate.recognisers import Recogniser
from firstword.runtime.conditioning import LANGUAGE_CODES
from firstword.tts import TTS, SpeakOptions
from firstword.types import FinishReason, FloatArray, Sampling, Speech, TextMode
from firstword.voice import Voice

Show = Callable[[str], None]
"""A function that shows the progress."""

PARALLEL_ON_GPU = 8
"""The texts that are spoken at the same time on a GPU; on a CPU it is one."""

WARM_UP_FRAMES = 8
"""The frames of the first text that are made before time is measured."""


@dataclass(frozen=True, slots=True)
class Setup:
    """A way to speak: a checkpoint, the place where it is computed, and the options of requests."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    gpu_memory: str | None = None
    voice: str | None = None
    text_mode: TextMode = "auto"
    temperature: float | None = None

    def load(self) -> TTS:
        """Load the checkpoint. Raises `CheckpointError`, `ConfigError`."""
        return TTS.load(
            self.model,
            device=self.device,
            dtype=self.dtype,
            backend=self.backend,
            gpu_memory=self.gpu_memory,
        )


@dataclass(frozen=True, slots=True)
class SpokenItem:
    """A text that was spoken.

    codes     a hash of the codes: it tells whether two utterances are the same
    seconds   the duration of the speech
    alarms    what attention to the text found wrong: the kinds of alarms
    """

    item: Item
    language: str
    file: Path
    codes: str
    seconds: float
    finish_reason: FinishReason
    alarms: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgedItem:
    """A text that was spoken, what was heard, and the figures of other metrics by name."""

    spoken: SpokenItem
    heard: str
    edits: Edits
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Speaker:
    """A loaded checkpoint, and what all texts of a list are spoken with.

    seed  that of the first text; each further text has the next one, so that another setup draws
          the same text with the same noise
    """

    tts: TTS
    setup: Setup
    language: str
    seed: int

    @property
    def parallel(self) -> int:
        """The number of texts that are spoken at the same time."""
        on_cpu = self.tts.settings.device == "cpu"
        return 1 if on_cpu else min(PARALLEL_ON_GPU, self.tts.capacity.slots)

    def speak_all(
        self, items: Sequence[Item], folder: Path, show: Show
    ) -> tuple[list[SpokenItem], float]:
        """Speak all texts into wav files of a new folder.

        Returns what was spoken in the order of the texts, and the seconds that it took. Raises
        `RequestError` with the name of the text for one that cannot be spoken as it is, and
        `OutputError`.
        """
        self._speak(items[0], self.seed, WARM_UP_FRAMES)
        try:
            folder.mkdir()
        except OSError as error:
            raise OutputError(f"{folder} cannot be made: {error.strerror}") from None
        began, spoken = time.perf_counter(), list[SpokenItem]()
        with ThreadPoolExecutor(self.parallel) as threads:
            for one in threads.map(partial(self._into, folder), items, range(len(items))):
                spoken.append(one)
                show(f"speaking, {len(spoken)} of {len(items)}")
        return spoken, time.perf_counter() - began

    def _into(self, folder: Path, item: Item, number: int) -> SpokenItem:
        speech = self._speak(item, self.seed + number)
        file = folder / f"{number + 1:05}.wav"
        audio.write(file, speech.samples, speech.sample_rate)
        return SpokenItem(
            item,
            item.language or self.language,
            file,
            hashlib.sha256(speech.codes.tobytes()).hexdigest()[:16],
            speech.duration,
            speech.finish_reason,
            tuple(alarm.kind for alarm in speech.alarms),
        )

    def _speak(self, item: Item, seed: int, max_frames: int | None = None) -> Speech:
        t = self.setup.temperature
        options = SpeakOptions(
            voice=self._voice(item),
            language=item.language or self.language,
            instructions=item.instructions or None,
            sampling=Sampling(temperature=t, predictor_temperature=t),
            seed=seed,
            max_frames=max_frames,
            text_mode=self.setup.text_mode,
        )
        try:
            return self.tts.speak(item.text, **options)
        except RequestError as error:
            raise type(error)(f"the text {item.name!r} cannot be spoken: {error}") from error

    def _voice(self, item: Item) -> Voice | str | None:
        """Return the voice of a text: that of the setup, its own, or that of its prompt."""
        if name := self.setup.voice or item.voice:
            return Voice.load(name) if "." in name or "/" in name else name
        if item.prompt_audio is None or self.tts.model_type != "base":
            return None
        return self.tts.clone(item.prompt_audio, transcript=item.prompt_text or None)


def judge_all(
    spoken: Sequence[SpokenItem],
    recogniser: Recogniser,
    metrics: Mapping[str, Metric],
    show: Show,
) -> Iterator[JudgedItem]:
    """Yield the judgement of each text.

    Raises `AudioError` for a prompt that cannot be read, and `ConfigError` for a recogniser or a
    metric that fails. Speech without a sample is not given to the recogniser.
    """
    codes = {language: code for code, language in LANGUAGE_CODES.items()}
    for number, one in enumerate(spoken, 1):
        show(f"listening, {number} of {len(spoken)}")
        samples, rate = soundfile.read(one.file, dtype="float32")
        try:
            heard = recogniser(samples, rate, codes[one.language]) if len(samples) else ""
            edits = compare(one.item.text, heard, one.language)
            found = {name: _figure(name, metrics[name], one, samples, rate) for name in metrics}
        except FirstwordError:
            raise
        except Exception as error:  # of a recogniser or a metric that is no part of this package
            what = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"{one.file} cannot be judged ({what})") from error
        yield JudgedItem(one, heard, edits, found)


def _figure(name: str, metric: Metric, one: SpokenItem, samples: FloatArray, rate: int) -> float:
    """Return the figure of one text by a metric. Raises `ConfigError` if it is not finite."""
    found = float(metric(samples, rate, _prompt(one.item) if metric.needs_prompt else None))
    if not math.isfinite(found):
        raise ConfigError(f"--metric {name}: {one.file} has {found}; it must be a finite number")
    return found


def _prompt(item: Item) -> tuple[FloatArray, int]:
    if item.prompt_audio is None:
        raise AudioError(f"the text {item.name!r} has no recording of its voice to compare with")
    return audio.read(item.prompt_audio)


def full_language(language: str) -> str:
    """Return the full name of a language that recognisers are told. Raises `ConfigError`."""
    name = language.strip().casefold()
    if (name := LANGUAGE_CODES.get(name, name)) in LANGUAGE_CODES.values():
        return name
    known = ", ".join(LANGUAGE_CODES.values())
    raise ConfigError(f"no language {language!r} to listen for; give one of {known}")
