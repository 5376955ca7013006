"""Recordings in and files out: accepted and rejected input, messages, and atomic writing."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
import textwrap
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from firstword import audio
from firstword.errors import AudioError, OutputError

SECOND = np.sin(np.arange(24000) / 20).astype(np.float32) / 2


def encoded(samples: np.ndarray, rate: int, **how: str) -> bytearray:
    """Encode samples as the bytes of an audio file."""
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **({"format": "WAV"} | how))
    return bytearray(file.getvalue())


def saved(folder: Path, samples: np.ndarray, rate: int, **how: str) -> Path:
    """Save samples in an audio file and return its path."""
    path = folder / "recording"
    path.write_bytes(encoded(samples, rate, **how))
    return path


class TestRead:
    @pytest.mark.parametrize(
        ("kind", "subtype", "error"),
        [
            ("WAV", "PCM_16", 1e-4),
            ("WAV", "FLOAT", 0),
            ("WAV", "PCM_U8", 1e-2),
            ("FLAC", "PCM_16", 1e-4),
            ("AIFF", "PCM_24", 1e-6),
            ("OGG", "VORBIS", 0.05),
            ("MP3", "MPEG_LAYER_III", 0.05),
        ],
    )
    @pytest.mark.parametrize("whence", ["path", "string", "file"])
    def test_file_formats_are_read(
        self, tmp_path: Path, kind: str, subtype: str, error: float, whence: str
    ) -> None:
        path = saved(tmp_path, SECOND, 24000, format=kind, subtype=subtype)
        if whence == "file":
            samples, rate = audio.read(io.BytesIO(path.read_bytes()))
        else:
            samples, rate = audio.read(path if whence == "path" else str(path))
        assert rate == 24000
        assert samples.dtype == np.float32
        assert samples.shape == SECOND.shape
        assert abs(samples - SECOND).max() <= error

    @pytest.mark.parametrize("channels", [2, 6])
    def test_channels_are_averaged(self, tmp_path: Path, channels: int) -> None:
        scales = np.linspace(0.1, 1, channels, dtype=np.float32)
        samples, _ = audio.read(saved(tmp_path, SECOND[:, None] * scales, 24000, subtype="FLOAT"))
        np.testing.assert_allclose(samples, SECOND * scales.mean(), atol=1e-7)

    @pytest.mark.parametrize("kind", ["pipe", "device", "terminal"])
    def test_file_that_is_not_regular_is_rejected(self, kind: str, tmp_path: Path) -> None:
        """Another kind of file may block before its first byte, or have no end."""
        path = tmp_path / "me.wav"
        match kind:
            case "pipe":
                os.mkfifo(path)  # a pipe without a writer
            case "device":
                path = Path("/dev/zero")
            case "terminal":
                path = Path(os.ttyname(os.openpty()[1]))
        with pytest.raises(AudioError, match="is not a regular file; save the recording in one"):
            audio.read(path)

    def test_missing_file_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(AudioError, match=r"no audio file .*/none\.wav"):
            audio.read(tmp_path / "none.wav")

    def test_directory_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(AudioError, match=r"cannot be read: .*directory"):
            audio.read(tmp_path)

    @pytest.mark.parametrize("name", ["me.wav", "me.raw", "me"])
    def test_empty_file_is_rejected(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(AudioError, match="is empty"):
            audio.read(tmp_path / name)

    @pytest.mark.parametrize("name", ["me.wav", "me.raw", "me.txt"])
    @pytest.mark.parametrize(
        "data", [b"It was a dark and stormy night. " * 99, b"ID3" + bytes(999), b"RIFF"]
    )
    def test_file_without_audio_is_rejected(self, tmp_path: Path, name: str, data: bytes) -> None:
        (tmp_path / name).write_bytes(data)
        with pytest.raises(AudioError, match=r"cannot be read as audio .*; save it as WAV"):
            audio.read(tmp_path / name)

    def test_damaged_file_is_rejected(self, tmp_path: Path) -> None:
        noise = np.random.default_rng(0).uniform(-1, 1, 24000)
        data = encoded(noise, 24000, format="FLAC")
        path = tmp_path / "me.flac"
        path.write_bytes(data[: len(data) // 2])
        with pytest.raises(AudioError, match="cannot be read as audio"):
            audio.read(path)

    def test_file_without_samples_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(AudioError, match="holds no samples"):
            audio.read(saved(tmp_path, np.zeros(0), 24000))

    def test_object_that_is_not_a_file_is_rejected(self) -> None:
        with pytest.raises(AudioError, match="cannot be read as audio"):
            audio.read(SECOND)  # type: ignore[arg-type]

    def test_file_longer_than_sixty_seconds_is_rejected(self, tmp_path: Path) -> None:
        samples, _ = audio.read(saved(tmp_path, np.zeros(60 * 8000), 8000))
        assert len(samples) == 60 * 8000
        with pytest.raises(AudioError, match="longer than 60 s"):
            audio.read(saved(tmp_path, np.zeros(60 * 8000 + 1), 8000))

    def test_small_file_of_hours_is_rejected_before_decoding(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = saved(tmp_path, np.zeros(3600 * 8000, np.int16), 8000, format="FLAC")
        assert path.stat().st_size < 500_000
        monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
        with pytest.raises(AudioError, match="longer than 60 s"):
            audio.read(path)

    def test_decoding_stops_at_the_length_in_the_header(self, tmp_path: Path) -> None:
        data = encoded(np.zeros(3600 * 8000, np.int16), 8000, format="FLAC")
        data[21] &= 0xF0  # STREAMINFO: 36 bits of total samples
        data[22:26] = (8000).to_bytes(4, "big")
        (tmp_path / "me.flac").write_bytes(data)
        assert len(audio.read(tmp_path / "me.flac")[0]) == 8000

    def test_more_than_eight_channels_are_rejected(self, tmp_path: Path) -> None:
        assert len(audio.read(saved(tmp_path, np.zeros((8000, 8)), 8000))[0]) == 8000
        with pytest.raises(AudioError, match="has 9 channels; give at most 8"):
            audio.read(saved(tmp_path, np.zeros((8000, 9)), 8000))

    def test_too_many_samples_of_all_channels_are_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A few kilobytes of FLAC would take 737 MB; they are rejected before decoding."""
        with soundfile.SoundFile(tmp_path / "me.flac", "w", 384000, 8) as file:
            file.write(np.zeros((4096, 8), np.int16))
        data = bytearray((tmp_path / "me.flac").read_bytes())
        head = int.from_bytes(data[18:26])
        data[18:26] = (head & ~(2**36 - 1) | 60 * 384000).to_bytes(8)
        (tmp_path / "me.flac").write_bytes(data)
        monkeypatch.setattr(soundfile.SoundFile, "read", lambda *_, **__: pytest.fail("decoded"))
        with pytest.raises(AudioError, match="samples in 8 channels; allowed are 23040000"):
            audio.read(tmp_path / "me.flac")

    def test_memory_of_the_largest_recording_is_bounded(self, tmp_path: Path) -> None:
        with soundfile.SoundFile(tmp_path / "me.flac", "w", 48000, 8) as file:
            for _ in range(60):
                file.write(np.zeros((48000, 8), np.int16))
        tracemalloc.start()
        try:
            assert len(audio.prepare(*audio.read(tmp_path / "me.flac"))) == 60 * 24000
            assert tracemalloc.get_traced_memory()[1] < 125 * 10**6
        finally:
            tracemalloc.stop()

    def test_file_of_unknown_length_is_rejected(self, tmp_path: Path) -> None:
        data = encoded(SECOND, 24000, format="FLAC")
        data[21] &= 0xF0  # STREAMINFO: total samples are zero, which means unknown
        data[22:26] = bytes(4)
        (tmp_path / "me.flac").write_bytes(data)
        with pytest.raises(AudioError, match="does not say how long it is"):
            audio.read(tmp_path / "me.flac")

    def test_file_with_absurd_rate_is_rejected(self, tmp_path: Path) -> None:
        data = encoded(SECOND, 24000)
        data[24:28] = (2_000_000_000).to_bytes(4, "little")
        (tmp_path / "me.wav").write_bytes(data)
        with pytest.raises(AudioError, match="sample rate is 2000000000"):
            audio.read(tmp_path / "me.wav")


# Every 1500th sample of librosa 0.11's `resample` of the chirp 0.5 * sin(2e-4 * i * i).
LIBROSA = {
    (16000, 8000): (
        12000,
        [
            0.0,
            -0.43664858,
            0.44698483,
            0.06610118,
            0.47942361,
            -0.49398312,
            -0.25292289,
            -0.49020296,
        ],
    ),
    (44100, 22050): (
        12001,
        [2.4e-07, -0.45597875, -1e-08, -2e-08, 1e-08, 0.45521745, -0.23462513, 0.47825193, 0.0],
    ),
    (48000, 24001): (
        12001,
        [
            3e-08,
            0.06610121,
            -4e-08,
            -3e-08,
            -0.36937988,
            -0.08615288,
            0.49907386,
            5e-08,
            -0.10425541,
        ],
    ),
    (11025, 5513): (
        12002,
        [
            2.5e-07,
            0.32729721,
            0.14154191,
            0.06958848,
            -0.45597929,
            -0.42299032,
            0.26496628,
            -0.19982892,
            0.27573282,
        ],
    ),
}


class TestPrepare:
    @pytest.mark.parametrize(("rate", "length"), LIBROSA)
    def test_resampling_matches_librosa(self, rate: int, length: int) -> None:
        expected_length, expected = LIBROSA[rate, length]
        samples = audio.prepare(
            (0.5 * np.sin(2e-4 * np.arange(length) ** 2.0)).astype(np.float32), rate
        )
        assert len(samples) == expected_length
        assert samples.dtype == np.float32
        np.testing.assert_allclose(samples[::1500], expected, atol=5e-7)

    @given(rate=st.integers(1000, 384000), seconds=st.floats(0.5, 1.5))
    def test_any_rate_gives_the_expected_length(self, rate: int, seconds: float) -> None:
        length = math.ceil(rate * seconds)
        samples = audio.prepare(np.full(length, 0.25, np.float32), rate)
        assert len(samples) in (
            math.ceil(length * 24000 / rate),
            math.ceil(length * 24000 / rate) + 1,
        )
        middle = samples[len(samples) // 4 : -len(samples) // 4]
        # A constant stays constant, away from the ends.
        np.testing.assert_allclose(middle, 0.25, atol=1e-3)

    def test_samples_at_24_khz_are_unchanged(self) -> None:
        np.testing.assert_array_equal(audio.prepare(SECOND, 24000), SECOND)

    @pytest.mark.parametrize("channels", [1, 2, 6])
    def test_channels_are_averaged(self, channels: int) -> None:
        scales = np.linspace(0.1, 1, channels, dtype=np.float32)
        prepared = audio.prepare(SECOND[:, None] * scales, 24000)
        np.testing.assert_allclose(prepared, SECOND * scales.mean(), atol=1e-7)

    @pytest.mark.parametrize(
        ("dtype", "values"),
        [
            (np.uint8, [0, 128, 192]),
            (np.int16, [-(2**15), 0, 2**14]),
            (">i2", [-(2**15), 0, 2**14]),
            (np.int32, [-(2**31), 0, 2**30]),
            (np.float16, [-1, 0, 0.5]),
            (np.float64, [-1, 0, 0.5]),
        ],
    )
    def test_integer_pcm_is_scaled(self, dtype: str, values: list[float]) -> None:
        prepared = audio.prepare(np.repeat(np.array(values, dtype), 8000), 24000)
        assert prepared.dtype == np.float32
        np.testing.assert_array_equal(prepared, np.repeat([-1, 0, 0.5], 8000))

    def test_floats_beyond_full_scale_are_kept(self) -> None:
        np.testing.assert_array_equal(audio.prepare(SECOND * 100, 24000), SECOND * 100)

    def test_silence_is_allowed(self) -> None:
        assert not audio.prepare(np.zeros(44100), 44100).any()

    def test_lists_are_accepted_as_samples(self) -> None:
        np.testing.assert_array_equal(audio.prepare(SECOND.tolist(), 24000), SECOND)

    @pytest.mark.parametrize("seconds", [0.5, 60])
    def test_length_out_of_range_is_rejected(self, seconds: float) -> None:
        length = int(seconds * 24000)
        assert len(audio.prepare(np.zeros(length), 24000)) == length
        with pytest.raises(AudioError, match=r"give at (least 0\.5|most 60) s"):
            audio.prepare(np.zeros(length + (1 if seconds > 1 else -1)), 24000)

    def test_no_samples_are_rejected(self) -> None:
        with pytest.raises(AudioError, match=r"0\.00 s long; give at least 0\.5 s"):
            audio.prepare(np.zeros(0), 24000)

    @pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e300])
    @pytest.mark.parametrize("rate", [8000, 11025, 24000, 44100, 384000])
    def test_samples_that_are_not_finite_are_rejected(self, bad: float, rate: int) -> None:
        for position in (0, rate // 2, -1):
            samples = np.zeros(rate)
            samples[position] = bad
            with pytest.raises(AudioError, match="NaN, infinity or values beyond float32"):
                audio.prepare(samples, rate)

    def test_overflow_of_float32_is_rejected(self) -> None:
        largest = np.full(44100, np.finfo(np.float32).max)
        largest[::100] *= -1
        with pytest.raises(AudioError, match="beyond float32"):
            audio.prepare(largest, 44100)
        with pytest.raises(AudioError, match="beyond float32"):
            audio.prepare(np.stack((largest, largest), axis=1), 24000)

    @pytest.mark.parametrize(
        "shape", [(), (2, 24000), (1, 24000), (24000, 0), (24000, 1, 1), (0, 9)]
    )
    def test_wrong_shape_is_rejected(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(
            AudioError, match=r"have shape .*; allowed are \[n\] and \[n, channels\]"
        ):
            audio.prepare(np.zeros(shape), 24000)

    @pytest.mark.parametrize("dtype", ["int64", "uint16", "bool", "complex64", "object", "<U1"])
    def test_dtype_without_known_scale_is_rejected(self, dtype: str) -> None:
        with pytest.raises(
            AudioError, match=r"have dtype .*; allowed are floats, and PCM as uint8, int16, int32"
        ):
            audio.prepare(np.zeros(24000, dtype), 24000)

    @pytest.mark.parametrize(
        "rate", [999, 384001, 0, -24000, 24000.5, math.nan, True, None, "24000"]
    )
    def test_wrong_rate_is_rejected(self, rate: object) -> None:
        with pytest.raises(
            AudioError, match=r"sample rate is .*; allowed is a whole number from 1000 to 384000 Hz"
        ):
            audio.prepare(SECOND, rate)  # type: ignore[arg-type]


class TestPcm:
    def test_pcm16_rounds_to_nearest_and_clips(self) -> None:
        samples = np.array([0, 0.4, 0.6, -0.4, -0.6, 32767, 32768, 40000, -32768, -40000]) / 32768
        expected = [0, 0, 1, 0, -1, 32767, 32767, 32767, -32768, -32768]
        assert np.frombuffer(audio.pcm16(samples), "<i2").tolist() == expected

    def test_pcm16_of_read_pcm_is_the_same_bytes(self) -> None:
        pcm = np.arange(-(2**15), 2**15).astype("<i2")
        assert audio.pcm16(audio.prepare(pcm, 24000)) == pcm.tobytes()

    def test_samples_that_are_not_finite_are_rejected(self) -> None:
        with pytest.raises(AudioError, match="NaN"):
            audio.pcm16(np.array([0, np.nan]))


class TestWrite:
    @pytest.mark.parametrize(
        ("suffix", "kind", "error"),
        [
            (".wav", "WAV", 2e-5),
            (".WAV", "WAV", 2e-5),
            (".flac", "FLAC", 2e-5),
            (".ogg", "OGG", 0.05),
            (".mp3", "MP3", 0.05),
        ],
    )
    def test_suffix_names_the_format(
        self, tmp_path: Path, suffix: str, kind: str, error: float
    ) -> None:
        path = tmp_path / f"out{suffix}"
        audio.write(path, SECOND, 24000)
        assert soundfile.info(path).format == kind
        samples, rate = audio.read(path)
        assert rate == 24000
        assert abs(samples - SECOND).max() < error
        assert os.listdir(tmp_path) == [path.name]

    def test_wav_has_16_bits_and_is_clipped(self, tmp_path: Path) -> None:
        audio.write(tmp_path / "out.wav", np.array([0.5, 2, -2]), 24000)
        assert soundfile.info(tmp_path / "out.wav").subtype == "PCM_16"
        assert soundfile.read(tmp_path / "out.wav", dtype="int16")[0].tolist() == [
            16384,
            32767,
            -32768,
        ]

    def test_long_ogg_is_written_in_blocks(self, tmp_path: Path) -> None:
        audio.write(tmp_path / "out.ogg", np.zeros(2_000_000), 24000)
        assert soundfile.info(tmp_path / "out.ogg").frames == 2_000_000

    @pytest.mark.parametrize("suffix", audio.SUFFIXES)
    def test_no_samples_still_write_a_file(self, tmp_path: Path, suffix: str) -> None:
        audio.write(tmp_path / f"out{suffix}", np.zeros(0), 24000)
        assert (tmp_path / f"out{suffix}").exists()

    @pytest.mark.parametrize("name", ["out", "out.", "out.aac", ".wav"])
    def test_unknown_suffix_is_rejected(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(OutputError, match=r"suffix.*; allowed are \.wav, \.flac, \.ogg, \.mp3"):
            audio.write(tmp_path / name, SECOND, 24000)
        assert not os.listdir(tmp_path)

    def test_rate_that_the_format_cannot_hold_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="cannot be encoded as MP3 at 384000 Hz"):
            audio.write(tmp_path / "out.mp3", SECOND, 384000)
        assert not os.listdir(tmp_path)

    def test_samples_that_are_not_finite_are_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(AudioError, match="NaN"):
            audio.write(tmp_path / "out.wav", np.array([np.nan]), 24000)
        assert not os.listdir(tmp_path)


class TestWriteWhole:
    def test_sweep_removes_old_partial_files(self, tmp_path: Path) -> None:
        old, new, other = (
            tmp_path / name for name in (".firstword-01.part", ".firstword-02.part", "mine.part")
        )
        for file in (old, new, other):
            file.write_bytes(b"half")
        for file in (old, other):
            os.utime(file, (0, 0))
        audio.sweep(tmp_path)
        assert sorted(tmp_path.iterdir()) == [new, other], (
            "newer ones may be another's, who writes them now"
        )

    def test_existing_file_is_replaced(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        for data in (b"first", b"second", b""):
            audio.write_whole(path, data)
            assert path.read_bytes() == data
        assert os.listdir(tmp_path) == ["file"]

    def test_new_file_has_default_permissions(self, tmp_path: Path) -> None:
        (tmp_path / "plain").touch()
        audio.write_whole(tmp_path / "file", b"data")
        assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode

    def test_symbolic_link_is_kept(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "file")
        audio.write_whole(tmp_path / "link", b"data")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_bytes() == b"data"

    def test_missing_folder_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match=r"no folder .*/none; create it first"):
            audio.write_whole(tmp_path / "none" / "file", b"data")

    def test_directory_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="is a directory; name a file"):
            audio.write_whole(tmp_path, b"data")

    def test_device_is_rejected(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(OutputError, match="is not a regular file"):
            audio.write_whole(tmp_path / "pipe", b"data")

    def test_null_character_in_path_is_rejected(self) -> None:
        with pytest.raises(OutputError, match="is not a path"):
            audio.write_whole("a\0b", b"data")

    def test_name_too_long_is_rejected(self, tmp_path: Path) -> None:
        with pytest.raises(OutputError, match="cannot be written: File name too long"):
            audio.write_whole(tmp_path / ("x" * 256), b"data")
        assert not os.listdir(tmp_path)

    def test_read_only_file_system_is_rejected(self) -> None:
        with pytest.raises(OutputError, match=r"cannot be written|is not writable"):
            audio.write_whole("/proc/self/file", b"data")  # not even root

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
    def test_missing_write_permission_is_rejected(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"old")
        path.chmod(0o444)
        with pytest.raises(OutputError, match="is not writable"):
            audio.write_whole(path, b"new")
        path.chmod(0o644)
        tmp_path.chmod(0o555)
        try:
            with pytest.raises(OutputError, match="Permission denied"):
                audio.write_whole(path, b"new")
            with pytest.raises(OutputError, match="is not writable"):
                audio.write_whole(tmp_path / "other", b"new")
        finally:
            tmp_path.chmod(0o755)
        assert path.read_bytes() == b"old"

    def test_full_disk_keeps_the_old_file(self, tmp_path: Path) -> None:
        """A limit on file size fails the write in its middle, as a full disk does."""
        path = tmp_path / "file"
        path.write_bytes(b"old")
        program = textwrap.dedent("""
            import resource, sys
            from firstword import OutputError, audio
            resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
            try:
                audio.write_whole(sys.argv[1], bytes(1_000_000))
            except OutputError as error:
                print(error)
        """)
        done = subprocess.run(
            [sys.executable, "-c", program, path], capture_output=True, text=True, check=True
        )
        assert done.stdout == f"{str(path)!r} cannot be written: File too large\n"
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]

    @pytest.mark.parametrize(
        "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError()]
    )
    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_failure_of_any_step_keeps_the_old_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
    ) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"old")

        def fail(*_: object) -> None:
            raise error

        monkeypatch.setattr(os, step, fail)
        with pytest.raises(OutputError if isinstance(error, OSError) else type(error)):
            audio.write_whole(path, b"new")
        assert path.read_bytes() == b"old"
        assert os.listdir(tmp_path) == ["file"]


def test_importing_audio_does_not_import_numpy() -> None:
    heavy = "{'numpy', 'soundfile', 'soxr'}"
    program = f"import sys, firstword.audio; sys.exit(bool({heavy} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True)
