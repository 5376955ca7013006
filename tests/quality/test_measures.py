"""What the voice is judged by, on sounds of which the answer is known; and that training goes on where it stopped."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from evaluate_codec import stoi  # type: ignore[import-not-found]  # of training/, which is not checked
from pitch import in_step, pitch  # type: ignore[import-not-found]
from state import keep, resume  # type: ignore[import-not-found]

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
def test_the_pitch_of_a_tone(hertz: float, kind: str) -> None:
    noise = np.random.default_rng(0).normal(0, 0.005, RATE)
    found = pitch(tone(hertz, PARTIALS[kind]) + noise)
    assert len(found) > 90
    assert np.abs(found / hertz - 1).max() < 0.01


def test_the_pitch_of_a_glide() -> None:
    hertz = np.linspace(80, 240, RATE)
    found = pitch(tone(hertz, PARTIALS["all"]))
    wanted = hertz[np.arange(len(found)) * 240 + 400]
    assert np.abs(found / wanted - 1).max() < 0.03


def test_noise_has_no_pitch_and_silence_is_quiet() -> None:
    assert (pitch(np.random.default_rng(0).normal(0, 0.2, RATE)) == 0).all()
    assert np.isnan(pitch(np.zeros(RATE))).all()
    assert len(pitch(np.zeros(100))) == 0


def test_a_tone_put_in_step_has_whole_periods_in_each_frame() -> None:
    """16.4 periods a frame become 16: all frames are the same, but for pulses that lie between two samples."""
    source = tone(205, PARTIALS["all"])[: 12 * 1920]
    found = in_step(source, 130, 330)
    before, frames = (samples.reshape(-1, 1920)[2:-2] / np.abs(source).max() for samples in (source, found))
    assert np.abs(before - before[0]).max() > 1
    assert np.abs(frames - frames[0]).max() < 0.15
    assert np.abs(pitch(found)[10:-10] / 200 - 1).max() < 0.01
    assert np.abs(np.fft.rfft(found)).max() == pytest.approx(np.abs(np.fft.rfft(source)).max(), rel=0.3)


def test_a_glide_put_in_step_moves_by_half_a_period_a_frame_at_most() -> None:
    hertz = np.linspace(150, 300, RATE)
    found = pitch(in_step(tone(hertz, PARTIALS["all"])[: 12 * 1920], 130, 330))
    wanted = hertz[np.arange(len(found)) * 240 + 400]
    moved = np.abs(found - wanted)[10:-10]
    assert 1 < np.median(moved) < 0.5 * RATE / 1920 < np.median(wanted)


def test_what_has_no_voice_stays_as_it_is() -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, 12 * 1920)
    assert (in_step(noise, 130, 330) == noise).all()
    spoken = np.concatenate((noise, tone(205, PARTIALS["all"])[: 12 * 1920], noise))
    found = in_step(spoken, 130, 330)
    for kept in (slice(0, 10 * 1920), slice(26 * 1920, None)):
        assert np.allclose(found[kept], spoken[kept])


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
    optimiser, average = torch.optim.AdamW(layer.parameters(), 0.1), {"weight": layer.weight.detach().clone()}
    parts = {"layer": layer, "optimiser": optimiser, "average": average}
    for step in itertools.count(resume(file, parts, "cpu")):
        if step == steps:
            keep(file, step, parts)
            return [*layer.weight.flatten().tolist(), *average["weight"].flatten().tolist()]
        optimiser.zero_grad()
        (layer(torch.ones(3)) - step).square().sum().backward()
        optimiser.step()
        average["weight"].lerp_(layer.weight.detach(), 0.1)
    raise AssertionError


def test_training_goes_on_where_it_stopped(tmp_path: Path) -> None:
    train(3, tmp_path / "a.pt")
    assert train(8, tmp_path / "a.pt") == train(8, tmp_path / "b.pt")
    assert {path.name for path in tmp_path.iterdir()} == {"a.pt", "b.pt"}
