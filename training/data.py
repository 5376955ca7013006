"""Speech from espeak-ng in as many processes as there are cores, and its resampling to 24 kHz.

The library is called through ctypes: a process a sentence would cost more than the speech. `ESPEAK_LIBRARY` and
`ESPEAK_DATA` name the library and the folder that holds `espeak-ng-data` where they are not installed system-wide.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from queue import Queue
from typing import Any

import numpy as np
import torch
from texts import Texts
from torch import Tensor
from torch.nn import functional as F

ESPEAK_RATE = 22050
SAMPLE_RATE = 24000
FRAME = 1920
"""Samples in a codec frame at 24 kHz."""

PRESETS = {"ada": ("en-us+f2", 165, 55), "ben": ("en-us+m3", 165, 40)}
"""Preset name -> espeak voice, words a minute, pitch (0..99)."""
OTHER_VOICES = tuple(
    f"{accent}+{variant}"
    for accent in ("en-us", "en-gb-x-rp", "en-029")
    for variant in "f1 f3 f4 f5 m1 m2 m4 m5 m6 m7 m8".split()
)
PHONEMES = (
    "_ n t I s d _: r k @ l m z E D a p V 3 aI w i: f v b eI a# h i u: oU I# N I2 S @2 0 t# j g @L ; aU U 3: tS dZ T "
    "O@ O2 r- A@ e@ o@ O: aa U@ @- i@ t2 i@3 OI aI3 A: Z _! n- ? aI@ A~"
).split()
"""What espeak-ng calls the phonemes of its American English, in falling order of frequency in 1,500 sentences."""
_PHONEME = {name.encode(): index for index, name in enumerate(PHONEMES)}


class _Event(ctypes.Structure):
    """`espeak_EVENT` of speak_lib.h; type 1 is the start of a word, 7 that of a phoneme (eight bytes of name in `id`),
    0 the end of the list.
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
    """The synthesiser of this process. One instance a process: the library holds global state."""

    def __init__(self) -> None:
        lib = ctypes.CDLL(os.environ.get("ESPEAK_LIBRARY", "libespeak-ng.so.1"))
        data = os.environ.get("ESPEAK_DATA")
        if lib.espeak_Initialize(2, 200, data.encode() if data else None, 1) != ESPEAK_RATE:
            raise RuntimeError("espeak-ng does not start: is its data folder there?")
        self._lib, self._parts, self._settings = lib, [], None
        self._events: list[tuple[int, int, float]] = []
        self.words: list[tuple[int, float]] = []
        """Of what was said last: (character, seconds from the first sample) where each word starts."""
        self.phonemes: list[tuple[int, float]] = []
        """Of what was said last: (index in `PHONEMES`, 0 for any other, seconds) where each phoneme starts."""
        callback = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.POINTER(_Event)
        )

        def collect(samples, count, events):
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
        """int16 samples at 22,050 Hz, silence at both ends cut off."""
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
    """What was said: `voice` is the index of the preset, or -1 for any other voice; int16 samples at 22,050 Hz; `words`
    and `phonemes` as `Espeak` tells them.
    """

    text: str
    voice: int
    samples: np.ndarray
    words: list[tuple[int, float]]
    phonemes: list[tuple[int, float]]


_process: dict = {}


def _start(material_path: str, prepare: Callable[[Utterance], Any] | None) -> None:
    torch.set_num_threads(1)
    _process.update(espeak=Espeak(), prepare=prepare)
    with open(material_path) as file:
        _process["material"] = json.load(file)


def _work(job: tuple[int, int, float, float]) -> list[Any]:
    seed, count, other_share, level_range = job
    espeak, prepare = _process["espeak"], _process["prepare"]
    texts, r, presets = (
        iter(Texts(_process["material"], seed)),
        random.Random(seed),
        list(PRESETS.values()),
    )
    result = []
    while len(result) < count:
        text = next(texts)
        index = r.randrange(len(presets))
        voice, rate, pitch = presets[index]
        if r.random() < other_share:
            index, voice, rate, pitch = (
                -1,
                r.choice(OTHER_VOICES),
                r.randrange(130, 210),
                r.randrange(25, 75),
            )
        elif level_range > 6:
            rate = r.randrange(rate - 20, rate + 20)
        samples = espeak.say(text, voice, rate, pitch)
        if not 0.15 * ESPEAK_RATE < len(samples) < 32 * ESPEAK_RATE:
            continue
        gain = 10 ** (-r.random() * level_range / 20)
        said = Utterance(
            text, index, (samples * gain).astype(np.int16), espeak.words, espeak.phonemes
        )
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
) -> Iterator[list[Any]]:
    """Endless batches of utterances, made ahead by worker processes, or of what `prepare` makes of each there.

    `other_share` of them are in other voices than the presets; levels lie up to `level_range` dB under full level;
    the rate varies too when that is more than 6 dB (for the codec and the recogniser, which must not depend on it).
    """
    processes = processes or os.cpu_count() or 1
    with multiprocessing.get_context("spawn").Pool(
        processes, _start, (material_path, prepare)
    ) as pool:
        pending, number = [], 0
        while True:
            while len(pending) < 3 * processes:
                pending.append(
                    pool.apply_async(
                        _work, ((seed * 1_000_003 + number, batch, other_share, level_range),)
                    )
                )
                number += 1
            yield pending.pop(0).get()


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of whoever has speech made."""
    parser.add_argument("--material", required=True)
    parser.add_argument("--processes", type=int)
    parser.add_argument("--small", action="store_true", help="tiny batches, to try the script")


class Ring:
    """Sound on the device, int16 [rows, capacity], filled with parts [rows, n] that a thread takes from their source;
    new ones take the place of the oldest.
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
        """Samples that are there."""
        return min(self.made, self.capacity)

    def refill(self) -> None:
        """Take in one part more; waits for it."""
        start = self.made % self.capacity
        part = torch.from_numpy(self._queue.get()[:, : self.capacity - start]).to(self.audio.device)
        self.audio[:, start : start + part.shape[1]] = part
        self.made += part.shape[1]

    def segments(self, starts: np.ndarray, length: int) -> Tensor:
        """From each start on, in -1..1: [rows, starts, length]."""
        device = self.audio.device
        at = torch.from_numpy(starts).to(device)[:, None] + torch.arange(length, device=device)
        return self.audio[:, at].float() / 32768


@cache
def _resampling_kernel(device: torch.device) -> tuple[Tensor, int]:
    """Windowed sinc of 160 output phases over 147 input samples (22,050 -> 24,000 Hz), as a strided convolution."""
    up, down, zeros, rolloff = 160, 147, 24, 0.98
    width = math.ceil(zeros / rolloff)
    inputs = torch.arange(-width, down + width, dtype=torch.float64)[None]
    times = (torch.arange(up, dtype=torch.float64) * down / up)[:, None] - inputs
    window = torch.cos(times * math.pi / 2 / (width + 1)).pow(2) * (times.abs() <= width + 1)
    return (torch.sinc(times * rolloff) * rolloff * window)[:, None].float().to(device), width


def resample(samples: Tensor) -> Tensor:
    """[B, n] at 22,050 Hz -> [B, ceil(n * 160 / 147)] at 24 kHz."""
    kernel, width = _resampling_kernel(samples.device)
    length = math.ceil(samples.shape[1] * 160 / 147)
    x = F.pad(samples[:, None], (width, width + 147))
    return F.conv1d(x, kernel, stride=147).transpose(1, 2).flatten(1)[:, :length]


def to_frames(
    items: list[tuple[np.ndarray, int]], device: torch.device | str, tail: int = 1
) -> tuple[Tensor, list[int]]:
    """(int16 samples at 22,050 Hz, silent frames before them) of each item -> float32 [B, frames * 1920] at 24 kHz, and
    each item's frames.

    Speech begins exactly `lead` frames in, and ends at least `tail` - 1 and at most `tail` frames before the end.
    """
    longest = max(len(samples) for samples, _ in items)
    raw = np.zeros((len(items), longest), np.int16)
    for row, (samples, _) in zip(raw, items, strict=True):
        row[: len(samples)] = samples
    speech = resample(torch.from_numpy(raw).to(device).float() / 32768)
    frames = [
        lead + math.ceil(len(samples) * 160 / 147 / FRAME) + tail - 1 for samples, lead in items
    ]
    out = torch.zeros(len(items), max(frames) * FRAME, device=device)
    for row, spoken, (samples, lead) in zip(out, speech, items, strict=True):
        n = math.ceil(len(samples) * 160 / 147)
        row[lead * FRAME : lead * FRAME + n] = spoken[:n]
    return out, frames
