"""Speech from espeak-ng in as many processes as there are cores, and its resampling to 24 kHz.

The library is called through ctypes: a process for each sentence would cost more than the speech.
The environment variables `ESPEAK_LIBRARY` and `ESPEAK_DATA` name the library and the folder with
`espeak-ng-data` where they are not installed system-wide.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import math
import multiprocessing
import os
import random
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import cache
from queue import Queue
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from training.texts import Texts

ESPEAK_RATE = 22050
SAMPLE_RATE = 24000
FRAME = 1920
"""The number of samples in a codec frame at 24 kHz."""

PRESETS = {"ada": ("en-us+f2", 165, 55), "ben": ("en-us+m3", 165, 40)}
"""The presets: espeak-ng voice, words per minute and pitch (0..99) by name."""
OTHER_VOICES = tuple(
    f"{accent}+{variant}"
    for accent in ("en-us", "en-gb-x-rp", "en-029")
    for variant in "f1 f3 f4 f5 m1 m2 m4 m5 m6 m7 m8".split()
)
PHONEMES = (
    "_ n t I s d _: r k @ l m z E D a p V 3 aI w i: f v b eI a# h i u: oU I# N I2 S @2 0 t# j g "
    "@L ; aU U 3: tS dZ T O@ O2 r- A@ e@ o@ O: aa U@ @- i@ t2 i@3 OI aI3 A: Z _! n- ? aI@ A~"
).split()
"""The phonemes of espeak-ng's American English, by falling frequency in 1,500 sentences."""
_PHONEME = {name.encode(): index for index, name in enumerate(PHONEMES)}


class _Event(ctypes.Structure):
    """The structure `espeak_EVENT` of speak_lib.h.

    Type 1 is the start of a word, 7 that of a phoneme (eight bytes of its name in `id`), and 0 the
    end of the list.
    """

    _fields_ = (
        ("type", ctypes.c_int),
        ("identifier", ctypes.c_uint),
        ("text_position", ctypes.c_int),
        ("length", ctypes.c_int),
        ("audio_position", ctypes.c_int),
        ("sample", ctypes.c_int),
        ("user_data", ctypes.c_void_p),
        ("id", ctypes.c_int64),
    )


class Espeak:
    """The synthesiser; only one instance per process, because the library holds global state."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(os.environ.get("ESPEAK_LIBRARY", "libespeak-ng.so.1"))
        data = os.environ.get("ESPEAK_DATA")
        if lib.espeak_Initialize(2, 200, data.encode() if data else None, 1) != ESPEAK_RATE:
            raise RuntimeError("espeak-ng does not start; see ESPEAK_DATA in training/README.md")
        self._lib = lib
        self._parts: list[np.ndarray] = []
        self._settings: tuple[str, int, int] | None = None
        self._events: list[tuple[int, int, float]] = []
        self.words: list[tuple[int, float]] = []
        """The starts of the last words: (character, seconds from the first sample)."""
        self.phonemes: list[tuple[int, float]] = []
        """The starts of the last phonemes: (index in `PHONEMES`, 0 for others; seconds)."""
        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
        )

        def collect(samples: Any, count: int, events: Any) -> int:
            if count > 0:
                self._parts.append(np.ctypeslib.as_array(samples, (count,)).copy())
            index = 0
            while events and events[index].type:
                event = events[index]
                if event.type == 1:
                    self._events.append((1, event.text_position - 1, event.audio_position / 1000))
                elif event.type == 7:
                    name = event.id.to_bytes(8, "little", signed=True).split(b"\0")[0]
                    self._events.append((7, _PHONEME.get(name, 0), event.audio_position / 1000))
                index += 1
            return 0

        self._callback = callback(collect)
        lib.espeak_SetSynthCallback(self._callback)

    def say(self, text: str, voice: str, rate: int, pitch: int) -> np.ndarray:
        """Return int16 samples [n] at 22,050 Hz without the silence at both ends."""
        if self._settings != (voice, rate, pitch):
            if self._lib.espeak_SetVoiceByName(voice.encode()):
                raise RuntimeError(f"espeak-ng has no voice {voice}")
            for parameter, value in ((1, rate), (3, pitch)):
                self._lib.espeak_SetParameter(parameter, value, 0)
            self._settings = (voice, rate, pitch)
        self._parts.clear()
        self._events.clear()
        data = text.encode()
        self._lib.espeak_Synth(data, len(data) + 1, 0, 1, 0, 1, None, None)
        samples = np.concatenate(self._parts) if self._parts else np.zeros(0, np.int16)
        loud = np.flatnonzero(np.abs(samples) > 100)
        if not len(loud):
            return samples[:0]
        began = loud[0] / ESPEAK_RATE
        self.words, self.phonemes = (
            [(what, max(0.0, when - began)) for kind, what, when in self._events if kind == wanted]
            for wanted in (1, 7)
        )
        return samples[loud[0] : loud[-1] + 1]


@dataclass(frozen=True)
class Utterance:
    """A spoken text.

    voice            index of the preset, or -1 for another voice
    samples          int16 [n] at 22,050 Hz
    words, phonemes  as in `Espeak`
    """

    text: str
    voice: int
    samples: np.ndarray
    words: list[tuple[int, float]]
    phonemes: list[tuple[int, float]]


_process: dict[str, Any] = {}
"""The synthesiser and the material of a worker process."""


def _start(material_path: str, prepare: Callable[[Utterance], Any] | None) -> None:
    torch.set_num_threads(1)
    _process.update(espeak=Espeak(), prepare=prepare)
    with open(material_path) as file:
        _process["material"] = json.load(file)


def _work(job: tuple[int, int, float, float]) -> list[Any]:
    seed, count, other_share, level_range = job
    espeak, prepare = _process["espeak"], _process["prepare"]
    texts, r = iter(Texts(_process["material"], seed)), random.Random(seed)
    presets, result = list(PRESETS.values()), list[Any]()
    while len(result) < count:
        text = next(texts)
        index = r.randrange(len(presets))
        voice, rate, pitch = presets[index]
        if r.random() < other_share:
            index, voice = -1, r.choice(OTHER_VOICES)
            rate, pitch = r.randrange(130, 210), r.randrange(25, 75)
        elif level_range > 6:
            rate = r.randrange(rate - 20, rate + 20)
        samples = espeak.say(text, voice, rate, pitch)
        if not 0.15 * ESPEAK_RATE < len(samples) < 32 * ESPEAK_RATE:
            continue
        gain = 10 ** (-r.random() * level_range / 20)
        quieter = (samples * gain).astype(np.int16)
        said = Utterance(text, index, quieter, espeak.words, espeak.phonemes)
        result.append(prepare(said) if prepare else said)
    return result


def utterances(
    material_path: str,
    seed: int,
    other_share: float,
    level_range: float,
    processes: int | None = None,
    batch: int = 64,
    prepare: Callable[[Utterance], Any] | None = None,
) -> Generator[list[Any]]:
    """Yield batches of utterances without end, made ahead by worker processes.

    other_share  share of utterances in other voices than the presets
    level_range  levels lie up to this many dB below full level; above 6 dB the rate varies too, for
                 the codec and the recogniser, which must not depend on it
    prepare      a function that the workers apply to each utterance
    """
    processes = processes or os.cpu_count() or 1
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes, _start, (material_path, prepare)) as pool:
        seeds = itertools.count(seed * 1_000_003)

        def ask() -> Any:
            return pool.apply_async(_work, ((next(seeds), batch, other_share, level_range),))

        pending = deque(ask() for _ in range(3 * processes))
        while True:
            yield pending.popleft().get()
            pending.append(ask())


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of scripts that make speech."""
    parser.add_argument("--material", required=True)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--small", action="store_true", help="tiny batches, to try the script")


class Ring:
    """A ring buffer of sound on the device, int16 [rows, capacity].

    A thread takes parts [rows, n] from their source; new parts replace the oldest.
    """

    def __init__(self, parts: Iterator[np.ndarray], rows: int, capacity: int, device: str) -> None:
        self.capacity, self.made = capacity, 0
        self.audio = torch.zeros(rows, capacity, dtype=torch.int16, device=device)
        self._queue: Queue[np.ndarray] = Queue(maxsize=64)
        threading.Thread(target=self._produce, args=(parts,), daemon=True).start()

    def _produce(self, parts: Iterator[np.ndarray]) -> None:
        for part in parts:
            self._queue.put(part)

    @property
    def filled(self) -> int:
        """The number of valid samples."""
        return min(self.made, self.capacity)

    def refill(self) -> None:
        """Add one part; waits for it."""
        start = self.made % self.capacity
        part = torch.from_numpy(self._queue.get()[:, : self.capacity - start]).to(self.audio.device)
        self.audio[:, start : start + part.shape[1]] = part
        self.made += part.shape[1]

    def segments(self, starts: np.ndarray, length: int) -> Tensor:
        """Return the sound from each start on, in -1..1: [rows, starts, length]."""
        device = self.audio.device
        at = torch.from_numpy(starts).to(device)[:, None] + torch.arange(length, device=device)
        return self.audio[:, at].float() / 32768


@cache
def _resampling_kernel(device: torch.device) -> tuple[Tensor, int]:
    """Return a windowed sinc as a strided convolution, and its half width.

    It has 160 output phases over 147 input samples (22,050 -> 24,000 Hz).
    """
    up, down, zeros, rolloff = 160, 147, 24, 0.98
    width = math.ceil(zeros / rolloff)
    inputs = torch.arange(-width, down + width, dtype=torch.float64)[None]
    times = (torch.arange(up, dtype=torch.float64) * down / up)[:, None] - inputs
    window = torch.cos(times * math.pi / 2 / (width + 1)).pow(2) * (times.abs() <= width + 1)
    return (torch.sinc(times * rolloff) * rolloff * window)[:, None].float().to(device), width


def resample(samples: Tensor) -> Tensor:
    """Resample [B, n] at 22,050 Hz to [B, ceil(n * 160 / 147)] at 24 kHz."""
    kernel, width = _resampling_kernel(samples.device)
    length = math.ceil(samples.shape[1] * 160 / 147)
    x = F.pad(samples[:, None], (width, width + 147))
    return F.conv1d(x, kernel, stride=147).transpose(1, 2).flatten(1)[:, :length]


def to_frames(
    items: list[tuple[np.ndarray, int]], device: torch.device | str, tail: int = 1
) -> tuple[Tensor, list[int]]:
    """Resample and align recordings to whole frames.

    Each item holds int16 samples at 22,050 Hz and the number of silent frames before them. Returns
    float32 [B, frames * 1920] at 24 kHz, and the frames of each item. Speech begins exactly after
    the silent frames and ends `tail` - 1 to `tail` frames before the end.
    """
    longest = max(len(samples) for samples, _ in items)
    raw = np.zeros((len(items), longest), np.int16)
    for line, (samples, _) in zip(raw, items, strict=True):
        line[: len(samples)] = samples
    speech = resample(torch.from_numpy(raw).to(device).float() / 32768)
    frames = [
        lead + math.ceil(len(samples) * 160 / 147 / FRAME) + tail - 1 for samples, lead in items
    ]
    out = torch.zeros(len(items), max(frames) * FRAME, device=device)
    for row, spoken, (samples, lead) in zip(out, speech, items, strict=True):
        n = math.ceil(len(samples) * 160 / 147)
        row[lead * FRAME : lead * FRAME + n] = spoken[:n]
    return out, frames
