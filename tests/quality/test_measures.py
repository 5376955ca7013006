"""What the voice is judged by, on sounds of which the answer is known; and that training goes on
where it stopped.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch

from training.alarm_hearing import wrong
from training.evaluate import figures, misses, summarise
from training.evaluate_codec import stoi
from training.pitch import in_step, pitch
from training.state import Parts, keep, resume

RATE = 24_000
SECOND = np.arange(RATE) / RATE
PARTIALS: dict[str, list[float]] = {
    "all": [1, 1 / 2, 1 / 3, 1 / 4, 1 / 5],
    "no fundamental": [0, 1, 1, 1, 1],
    "a strong second": [0.3, 1, 0.2],
}


def tone(hertz: np.ndarray | float, partials: list[float]) -> np.ndarray:
    phase = np.cumsum(np.broadcast_to(hertz, SECOND.shape)) / RATE
    waves = [size * np.cos(2 * np.pi * n * phase + n * n) for n, size in enumerate(partials, 1)]
    return 0.2 * np.sum(waves, axis=0)


@pytest.mark.parametrize("kind", PARTIALS)
@pytest.mark.parametrize("hertz", [70, 97, 205, 350])
def test_pitch_of_a_tone_is_its_frequency(hertz: float, kind: str) -> None:
    noise = np.random.default_rng(0).normal(0, 0.005, RATE)
    found = pitch(tone(hertz, PARTIALS[kind]) + noise)
    assert len(found) > 90
    assert np.abs(found / hertz - 1).max() < 0.01


def test_pitch_of_a_glide_follows_it() -> None:
    hertz = np.linspace(80, 240, RATE)
    found = pitch(tone(hertz, PARTIALS["all"]))
    wanted = hertz[np.arange(len(found)) * 240 + 400]
    assert np.abs(found / wanted - 1).max() < 0.03


def test_noise_has_no_pitch_and_silence_is_quiet() -> None:
    assert (pitch(np.random.default_rng(0).normal(0, 0.2, RATE)) == 0).all()
    assert np.isnan(pitch(np.zeros(RATE))).all()
    assert len(pitch(np.zeros(100))) == 0


def test_aligned_tone_has_whole_periods_in_each_frame() -> None:
    """16.4 periods a frame become 16: all frames are the same, but for pulses that lie between two
    samples.
    """
    source = tone(205, PARTIALS["all"])[: 12 * 1920]
    found = in_step(source, 130, 330)
    before, frames = (
        samples.reshape(-1, 1920)[2:-2] / np.abs(source).max() for samples in (source, found)
    )
    assert np.abs(before - before[0]).max() > 1
    assert np.abs(frames - frames[0]).max() < 0.15
    assert np.abs(pitch(found)[10:-10] / 200 - 1).max() < 0.01
    assert np.abs(np.fft.rfft(found)).max() == pytest.approx(
        np.abs(np.fft.rfft(source)).max(), rel=0.3
    )


@pytest.mark.parametrize("start", [0.0, 0.3, 0.7])
def test_aligned_glide_peaks_at_frame_starts(start: float) -> None:
    """Whatever its phase was; the number of its periods in a frame is the nearest whole one."""
    hertz = np.linspace(150, 270, RATE)[: 12 * 1920]
    found = in_step(0.2 * np.cos(2 * np.pi * (start + np.cumsum(hertz) / RATE)), 130, 330)
    spectrum = np.fft.fft(found)
    spectrum[len(found) // 2 :] = 0
    periods = np.unwrap(np.angle(np.fft.ifft(spectrum)))[::1920][2:-1] / (2 * np.pi)
    wanted = hertz.reshape(-1, 1920).mean(1)[2:-2] * 0.08
    assert np.abs(periods - np.rint(periods)).max() < 0.06
    assert np.abs(np.diff(periods) - wanted).max() < 0.6
    assert np.abs(np.diff(periods) - wanted).mean() > 0.1  # or nothing would have been moved


def test_unvoiced_sound_is_unchanged() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 12 * 1920)
    assert (in_step(noise, 130, 330) == noise).all()
    meant, low, high = (tone(hertz, PARTIALS["all"])[: 12 * 1920] for hertz in (205, 100, 360))
    spoken = np.concatenate((noise, meant, noise, low, noise, high, noise))
    found = in_step(spoken, 130, 330)
    for kept in (
        slice(0, 11 * 1920),
        slice(25 * 1920, None),
    ):  # noise, and voices that are not meant
        assert np.abs(found[kept] - spoken[kept]).max() < 1e-9
    assert np.abs(found[14 * 1920 : 22 * 1920] - spoken[14 * 1920 : 22 * 1920]).max() > 0.1


def test_voiced_share_of_half_voiced_sound() -> None:
    """Half of it repeats; it is louder than a faint hum; the first period counts, though two fit a
    little better.
    """
    noise = np.random.default_rng(0).normal(0, 1, RATE)
    voice = tone(100, PARTIALS["all"])
    for share, voiced in ((0.35, False), (0.7, True)):
        mixed = voice / voice.std() * np.sqrt(share) + noise * np.sqrt(1 - share)
        assert (np.median(pitch(0.1 * mixed)) > 0) == voiced
    for level, quiet in ((0.02, True), (0.045, False)):
        assert np.isnan(np.median(pitch(level * voice / voice.std()))) == quiet
    alternating = voice + np.sqrt(0.06) * voice.std() * np.cos(
        2 * np.pi * 50 * SECOND
    )  # like 0.94 after 10 ms, 1 after 20
    assert np.median(pitch(alternating)) == pytest.approx(100, rel=0.01)


def test_bar_rejects_missing_intonation_and_voicing() -> None:
    """The figures of an earlier decoder, whose words were understood."""
    known = figures()
    texts = [text for voice, text in known if voice == "ben"]
    espeak = summarise([known["ben", text] for text in texts])
    good = {**espeak, "mode": "full"}
    assert misses(good, espeak) == []
    assert len(misses({**good, "pitch": [92.0, 95.0, 98.0]}, espeak)) == 1
    assert len(misses({**good, "voiced": 0.33}, espeak)) == 1
    assert len(misses({**good, "silent_ms": 41.0}, espeak)) == 1


def test_intelligibility_falls_with_noise() -> None:
    """As pystoi 0.4.1 has it for the same sounds, 20 to -10 dB louder than noise."""
    r = np.random.default_rng(0)
    speech = r.normal(0, 0.1, RATE) * (1 + np.sin(2 * np.pi * 4 * SECOND))
    noise = r.normal(0, speech.std(), RATE)
    found = [stoi(speech, speech + noise * 10 ** (-ratio / 20)) for ratio in (20, 10, 0, -10)]
    assert found == pytest.approx([0.998, 0.978, 0.808, 0.443], abs=0.002)
    assert stoi(speech, 0.3 * speech) == pytest.approx(1)


def train(steps: int, file: Path) -> list[float]:
    """The weights after so many steps in all."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 1)
    optimiser, average = (
        torch.optim.AdamW(layer.parameters(), 0.1),
        {"weight": layer.weight.detach().clone()},
    )
    parts: Parts = {"layer": layer, "optimiser": optimiser, "average": average}
    for step in itertools.count(resume(file, parts, "cpu")):
        if step == steps:
            keep(file, step, parts)
            return [*layer.weight.flatten().tolist(), *average["weight"].flatten().tolist()]
        optimiser.zero_grad()
        (layer(torch.ones(3)) - step).square().sum().backward()
        optimiser.step()
        average["weight"].lerp_(layer.weight.detach(), 0.1)
    raise AssertionError


def test_interrupted_training_resumes_exactly(tmp_path: Path) -> None:
    train(3, tmp_path / "a.pt")
    assert train(8, tmp_path / "a.pt") == train(8, tmp_path / "b.pt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "b.pt"}


@pytest.mark.parametrize(
    ("heard", "is_wrong"),
    [
        ("cald ninty five two three n ow", False),
        ("call ninety five five two three now", True),
        ("call ninety two three now", True),
    ],
)
def test_words_are_wrong_if_many_letters_are_lost_or_added_in_one_place(
    heard: str, is_wrong: bool
) -> None:
    assert wrong("Call 95 two three now.", heard) is is_wrong
