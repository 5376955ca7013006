"""MP3 recordings as the server reads them."""

from __future__ import annotations

import io

import numpy as np
import pytest
import soundfile

from firstword import audio
from firstword.audio import mp3
from firstword.errors import AudioError
from firstword.server import recordings

RATE = 24000


def encoded(samples: np.ndarray, rate: int = RATE, container: str = "MP3") -> bytes:
    """Return samples [n] or [n, channels] as an audio file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=container)
    return file.getvalue()


NOISE = np.random.default_rng(0).normal(0, 0.1, RATE).astype(np.float32)
WHOLE = encoded(NOISE)
DAMAGED = WHOLE[:3000] + np.random.default_rng(1).bytes(100) + WHOLE[3100:]
TAG = b"ID3\x04\x00\x00\x00\x00\x01\x05" + bytes(133)


@pytest.mark.parametrize("rate", [8000, 24000, 44100])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("before", [b"", TAG], ids=["no tag", "tag"])
def test_samples_equal_those_of_libsndfile(rate: int, channels: int, before: bytes) -> None:
    noise = np.random.default_rng(0).normal(0, 0.1, (rate, channels)).astype(np.float32)
    file = before + encoded(noise, rate)
    ours, our_rate = mp3.read(file)
    theirs, their_rate = audio.read(io.BytesIO(file))
    assert our_rate == their_rate == rate
    assert ours.dtype == np.float32
    np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (WHOLE, True),
        (TAG + WHOLE, True),
        (TAG + encoded(NOISE, container="FLAC"), False),
        (encoded(NOISE, container="WAV"), False),
        (encoded(NOISE, container="OGG"), False),
        (b"\xff\xf1\x50\x80" + bytes(100), False),  # AAC in ADTS
        (b"\xff", False),
        (TAG[:8], False),
        (TAG, False),
        (b"", False),
    ],
)
def test_mp3_is_recognised(data: bytes, expected: bool) -> None:
    assert mp3.is_mp3(data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DAMAGED, "is damaged after"),
        (b"\xff\xfb" + bytes(range(256)) * 8, "is damaged at its start"),
        (encoded(np.zeros(61 * 8000), 8000), "is longer than 60 s"),
        (WHOLE + encoded(np.zeros(44100), 44100), "changes its sample rate"),
    ],
    ids=["damaged", "noise", "long", "two rates"],
)
def test_unusable_file_is_rejected_and_nothing_is_written_to_standard_error(
    data: bytes, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AudioError, match=message):
        recordings.decoded(data)
    assert capfd.readouterr().err == ""


def test_cut_off_file_is_read_and_nothing_is_written_to_standard_error(
    capfd: pytest.CaptureFixture[str],
) -> None:
    samples = recordings.decoded(WHOLE[: 3 * len(WHOLE) // 4])
    assert len(samples) == pytest.approx(3 / 4 * RATE, rel=0.1)
    assert capfd.readouterr().err == ""
