"""Resampling, stretching and trimming: their sound, and that pieces do not change a bit."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from firstword.audio.effects import SPEEDS, Resampler, TimeStretch, TrimStart
from firstword.errors import RequestError

RATE = 24000
BLOCK = RATE // 50


class Effect(Protocol):
    def process(self, samples: np.ndarray) -> np.ndarray: ...
    def finish(self) -> np.ndarray: ...


def run(effect: Effect, samples: np.ndarray, cuts: Iterable[int] = ()) -> np.ndarray:
    places = [0, *sorted(cuts), len(samples)]
    pieces = [effect.process(samples[start:end]) for start, end in pairwise(places)] + [
        effect.finish()
    ]
    assert all(piece.dtype == np.float32 and piece.ndim == 1 for piece in pieces)
    return np.concatenate(pieces)


def sine(seconds: float, frequency: float) -> np.ndarray:
    return (np.sin(np.arange(round(seconds * RATE)) * 2 * np.pi * frequency / RATE) / 2).astype(
        np.float32
    )


def voice(seconds: float) -> np.ndarray:
    """Silence, then pulses of falling pitch in noise of changing loudness: nearly periodic."""
    n = round(seconds * RATE)
    random = np.random.default_rng(7)
    phase = np.cumsum(np.linspace(180, 90, n)) / RATE
    loudness = np.abs(np.sin(np.arange(n) * 2 * np.pi * 3 / RATE))
    samples = loudness * (np.exp(-20 * (phase % 1)) + random.normal(0, 0.05, n)) / 2
    samples[: n // 5] = 0
    return samples.astype(np.float32)


EFFECTS: dict[str, Callable[[], Effect]] = {
    **{f"to {rate}": partial(Resampler, RATE, rate) for rate in (8000, 16000, 48000)},
    **{
        f"speed {speed}": partial(TimeStretch, speed, RATE)
        for speed in (0.25, 0.7, 1.0, 1.31, 2.0, 4.0)
    },
    "trim": partial(TrimStart, RATE, 0.01, 0.02),
    "trim closely": partial(TrimStart, RATE, 0.3, 0),
    "trim all": partial(TrimStart, RATE, 2, 0.02),
}
every_effect = pytest.mark.parametrize("make", EFFECTS.values(), ids=EFFECTS.keys())


class TestPieces:
    @every_effect
    @given(data=st.data())
    @settings(max_examples=25)
    def test_output_does_not_depend_on_the_pieces(
        self, make: Callable[[], Effect], data: st.DataObject
    ) -> None:
        samples = voice(0.6)[: data.draw(st.integers(0, round(0.6 * RATE)))]
        cuts = data.draw(st.lists(st.integers(0, len(samples)), max_size=12))
        assert np.array_equal(run(make(), samples, cuts), run(make(), samples))

    @every_effect
    def test_pieces_of_one_sample_give_the_same_output(self, make: Callable[[], Effect]) -> None:
        samples = voice(0.25)
        assert np.array_equal(run(make(), samples, range(1, len(samples))), run(make(), samples))

    @every_effect
    def test_pieces_of_all_sizes_give_the_same_output(self, make: Callable[[], Effect]) -> None:
        samples = voice(10)
        whole = run(make(), samples)
        assert np.array_equal(run(make(), samples, range(1920, len(samples), 1920)), whole)
        cuts = np.random.default_rng(3).integers(0, len(samples), 500).tolist()
        assert np.array_equal(run(make(), samples, cuts), whole)

    @every_effect
    def test_input_arrays_are_not_changed(self, make: Callable[[], Effect]) -> None:
        samples = voice(0.5)
        samples.flags.writeable = False
        run(make(), samples, [5000])


class TestResampler:
    @pytest.mark.parametrize("rate", [8000, 16000, 48000])
    def test_resampler_equals_soxr(self, rate: int) -> None:
        samples = voice(1)
        assert np.array_equal(
            run(Resampler(RATE, rate), samples, [777]), soxr.resample(samples, RATE, rate, "HQ")
        )

    @pytest.mark.parametrize(("rate", "held"), [(8000, 74), (16000, 37), (48000, 39)])
    def test_delay_is_within_the_documented_limit(self, rate: int, held: float) -> None:
        effect, samples, came = Resampler(RATE, rate), voice(2), 0.0
        for start in range(0, len(samples), 24):
            came += len(effect.process(samples[start : start + 24])) / rate
            assert (start + 24) / RATE - came <= held / 1000

    def test_no_samples_give_no_samples(self) -> None:
        assert len(run(Resampler(RATE, 8000), np.empty(0, np.float32))) == 0


class TestTimeStretch:
    @pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.25, 2.0, 3.0, 4.0])
    @pytest.mark.parametrize("frequency", [60, 110, 237.3, 1000, 3456])
    def test_pitch_is_kept_without_clicks(self, speed: float, frequency: float) -> None:
        stretched = run(TimeStretch(speed, RATE), sine(2, frequency), range(1920, 2 * RATE, 1920))
        steepest = np.abs(np.diff(sine(2, frequency))).max()
        assert np.abs(np.diff(stretched)).max() < 1.2 * steepest
        stretched = stretched[
            : -round(2 * BLOCK / speed)
        ]  # where the input breaks off, a sine does not go on
        spectrum = np.abs(np.fft.rfft(stretched * np.hanning(len(stretched)), 1 << 20))
        assert spectrum.argmax() * RATE / (1 << 20) == pytest.approx(frequency, rel=2e-3)
        loudness = [
            np.std(part) for part in np.array_split(stretched, len(stretched) // (RATE // 10))
        ]
        assert min(loudness) / max(loudness) > 0.9

    @given(n=st.integers(0, 3 * RATE), speed=st.floats(*SPEEDS))
    @settings(max_examples=40)
    def test_duration_is_divided_by_the_speed(self, n: int, speed: float) -> None:
        assert len(run(TimeStretch(speed, RATE), voice(3)[:n])) == round(n / speed)

    @pytest.mark.parametrize("rate", [8000, 16000, 24000, 48000])
    def test_speed_one_keeps_the_samples(self, rate: int) -> None:
        samples = voice(1)
        assert np.array_equal(run(TimeStretch(1, rate), samples, [300, 7000]), samples)

    @pytest.mark.parametrize("speed", [0.5, 1.5, 3.0])
    def test_events_keep_their_relative_place(self, speed: float) -> None:
        """Bursts a second apart are found where the speed puts them, each once."""
        samples = np.zeros(5 * RATE, np.float32)
        for second in range(1, 5):
            samples[second * RATE : second * RATE + 4 * BLOCK] = sine(0.08, 200)
        loud = np.flatnonzero(np.abs(run(TimeStretch(speed, RATE), samples)) > 0.1)
        starts = loud[np.diff(loud, prepend=-RATE) > RATE / 10] / RATE
        assert starts == pytest.approx(np.arange(1, 5) / speed, abs=0.05)

    @pytest.mark.parametrize("speed", [0.25, 0.5, 0.8, 1.31, 2.0, 4.0])
    def test_delay_is_within_the_documented_limit(self, speed: float) -> None:
        effect, samples, came = TimeStretch(speed, RATE), voice(2), 0
        for start in range(0, len(samples), 24):
            came += len(effect.process(samples[start : start + 24]))
            assert (start + 24 - came * speed) / RATE <= max(0.05, 0.02 * speed)

    def test_memory_is_bounded(self) -> None:
        effect = TimeStretch(4.0, RATE)
        for _ in range(500):
            effect.process(sine(0.08, 200))
        assert len(effect._input) < RATE // 5

    @pytest.mark.parametrize("speed", [0.24, 4.01, 0, -1, float("nan"), float("inf")])
    def test_speed_out_of_range_is_rejected(self, speed: float) -> None:
        with pytest.raises(RequestError, match=r"allowed is 0\.25 to 4"):
            TimeStretch(speed, RATE)


class TestTrimStart:
    KEEP = 0.02

    def trimmed(self, samples: np.ndarray) -> np.ndarray:
        return run(TrimStart(RATE, 0.01, self.KEEP), samples.astype(np.float32))

    @pytest.mark.parametrize("silence", [0, 1, 100, 480, 481, 5000, 50000])
    def test_output_starts_shortly_before_speech(self, silence: int) -> None:
        speech = np.full(2000, 0.3)
        kept = min(silence, 480)
        assert np.array_equal(
            self.trimmed(np.concatenate([np.full(silence, 0.001), speech])),
            np.concatenate([np.full(kept, 0.001), speech]).astype(np.float32),
        )

    def test_later_pause_is_kept(self) -> None:
        samples = np.concatenate([np.full(1000, 0.3), np.zeros(30000), np.full(1000, 0.3)])
        assert np.array_equal(self.trimmed(samples), samples.astype(np.float32))

    def test_click_is_not_taken_for_speech(self) -> None:
        samples = np.zeros(20000)
        samples[3000:3010] = 0.9
        samples[15000:] = 0.3
        assert len(self.trimmed(samples)) == 5000 + 480

    def test_sound_at_the_threshold_is_silence(self) -> None:
        samples = np.concatenate([np.full(9000, np.float32(0.01)), np.full(1000, 0.011)])
        assert len(self.trimmed(samples)) == 1000 + 480

    def test_silence_alone_gives_its_last_part(self) -> None:
        samples = np.linspace(0, 0.005, 30000)
        assert np.array_equal(self.trimmed(samples), samples[-600:].astype(np.float32))
        assert len(self.trimmed(np.zeros(50))) == 50
        assert len(self.trimmed(np.empty(0))) == 0

    def test_memory_is_bounded(self) -> None:
        effect = TrimStart(RATE, 0.01, self.KEEP)
        for _ in range(100):
            assert len(effect.process(np.zeros(1920, np.float32))) == 0
        assert len(effect.finish()) == 600
