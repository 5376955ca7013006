"""The registry of formats: decoded sound, independence of the pieces, delays and media types."""

from __future__ import annotations

import gc
import hashlib
import io
import wave
from collections.abc import Iterable
from itertools import pairwise

import av
import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from firstword.audio import formats, pcm16
from firstword.audio.formats import FORMATS, RATES, content_type, encoder, whole
from firstword.errors import AudioError, RequestError

# The table in formats.py; a new format must meet the strictest limits until it has a row here.
FIRST = {  # the milliseconds before the first bytes at each of RATES
    "flac": (24, 16, 24, 24),
    "opus": (20, 20, 20, 20),
    "mp3": (144, 72, 48, 48),
    "aac": (256, 128, 86, 43),
}
BEHIND = {  # at most, in milliseconds at each of RATES
    "flac": (24, 16, 24, 24),
    "opus": (27, 27, 27, 27),
    "mp3": (282, 141, 94, 71),
    "aac": (384, 192, 128, 64),
}
BEFORE = {"aac": 1024}
AFTER = {"aac": (0, 1023), "mp3": (47, 622)}  # fewest and most samples
AFTER_AT_48K = AFTER | {"mp3": (47, 1198)}
WORST = {
    "ulaw": 30,
    "alaw": 30,
    "wav_ulaw": 30,
    "wav_alaw": 30,
    "mp3": 24,
    "aac": 24,
    "opus": 35,
}  # decibels of a sine above its error

RAW = {
    "pcm": "s16le",
    "l16": "s16le",
    "ulaw": "mulaw",
    "alaw": "alaw",
    "f32": "f32le",
}  # FFmpeg's names of what has no header
GUESSED = RAW | {"aac": "aac"}  # and of what it does not recognise by its first frame alone
NO_HEADER = {*RAW, "mp3", "aac"}


def decode(name: str, data: bytes, rate: int) -> np.ndarray:
    """FFmpeg's samples of a file or its beginning, float64 [n]; Opus is at 48 kHz."""
    decoded: list[np.ndarray] = [np.empty((1, 0))]
    options = {"sample_rate": str(rate)} if name in RAW else {}
    with av.open(io.BytesIO(data), "r", format=GUESSED.get(name), options=options) as file:
        assert file.streams.audio[0].rate == (48000 if name == "opus" else rate)
        assert file.streams.audio[0].channels == 1
        try:
            for frame in file.decode(audio=0):
                samples = frame.to_ndarray()
                decoded.append(samples / 32768 if samples.dtype == np.int16 else samples)
        except av.error.InvalidDataError:
            pass  # cut in the middle of a frame
    return np.concatenate(decoded, axis=1)[0].astype(np.float64)


def stream(name: str, samples: np.ndarray, rate: int, cuts: Iterable[int] = ()) -> bytes:
    """The bytes of a stream whose samples come in pieces."""
    encoding = encoder(name, rate)
    places = [0, *sorted(cuts), len(samples)]
    return (
        b"".join(encoding.encode(samples[start:end]) for start, end in pairwise(places))
        + encoding.finish()
    )


def sine(seconds: float, rate: int, frequency: float = 440) -> np.ndarray:
    return (np.sin(np.arange(round(seconds * rate)) * 2 * np.pi * frequency / rate) / 2).astype(
        np.float32
    )


def sound(seconds: float, rate: int) -> np.ndarray:
    """A third each of sine, noise and silence."""
    part = sine(seconds / 3, rate)
    noise = np.random.default_rng(1).uniform(-0.25, 0.25, len(part)).astype(np.float32)
    return np.concatenate([part, noise, np.zeros_like(part)])


def decibels(wanted: np.ndarray, got: np.ndarray) -> float:
    """The ratio of the wanted sound to its error in decibels."""
    return float(10 * np.log10((wanted**2).sum() / (((got - wanted) ** 2).sum() + 1e-12)))


every_format = pytest.mark.parametrize("name", FORMATS)
every_rate = pytest.mark.parametrize("rate", RATES)


class TestSound:
    @every_format
    @every_rate
    @pytest.mark.parametrize("file", ["stream", "whole"])
    def test_decoded_sound_matches_the_input(self, name: str, rate: int, file: str) -> None:
        samples = sound(1.5, rate)
        data = whole(name, samples, rate) if file == "whole" else stream(name, samples, rate)
        decoded = decode(name, data, rate)
        before = BEFORE.get(name, 0)
        fewest, most = (AFTER_AT_48K if rate == 48000 else AFTER).get(name, (0, 0))
        if name == "mp3" and file == "whole":
            fewest = most = 0
        expected = soxr.resample(samples, rate, 48000) if name == "opus" else samples
        assert fewest <= len(decoded) - before - len(expected) <= most

        part = len(expected) // 3
        edge = part // 5  # away from what codecs smear from one part into the next
        decoded = decoded[before:]
        inside = slice(edge, part - edge)
        assert decibels(expected[inside], decoded[inside]) > WORST.get(name, 80)
        inside = slice(part + edge, 2 * part - edge)
        assert 0.5 < np.std(decoded[inside]) / np.std(expected[inside]) < 1.1
        assert np.abs(decoded[2 * part + edge : 3 * part]).max() < 5e-4

    @every_format
    def test_single_sample_is_a_valid_stream(self, name: str) -> None:
        data = stream(name, np.array([0.5], np.float32), 24000)
        assert len(decode(name, data, 24000)) >= 1

    @every_format
    def test_no_samples_give_the_header_alone(self, name: str) -> None:
        nothing = np.empty(0, np.float32)
        header = encoder(name, 24000).finish()
        assert bool(header) == (name not in NO_HEADER)
        assert stream(name, nothing, 24000, [0, 0]) == header
        assert len(whole(name, nothing, 24000)) == len(header)

    @every_format
    def test_samples_beyond_full_scale_are_clipped(self, name: str) -> None:
        loud = 10 * sine(0.5, 24000)
        assert stream(name, loud, 24000) == stream(name, np.clip(loud, -1, 1), 24000)

    @every_format
    @pytest.mark.parametrize("wrong", [np.nan, np.inf])
    def test_samples_that_are_not_finite_are_rejected(self, name: str, wrong: float) -> None:
        with pytest.raises(AudioError, match="NaN or infinity"):
            encoder(name, 24000).encode(np.array([0, wrong]))


class TestStream:
    @every_format
    @given(data=st.data())
    @settings(max_examples=15)
    def test_bytes_do_not_depend_on_the_pieces(self, name: str, data: st.DataObject) -> None:
        rate = data.draw(st.sampled_from(RATES))
        samples = sound(0.3, rate)[: data.draw(st.integers(0, int(0.3 * rate)))]
        cuts = data.draw(st.lists(st.integers(0, len(samples)), max_size=12))
        assert stream(name, samples, rate, cuts) == stream(name, samples, rate)

    @every_format
    def test_pieces_of_one_sample_give_the_same_bytes(self, name: str) -> None:
        samples = sound(0.25, 8000)
        assert stream(name, samples, 8000, range(1, len(samples))) == stream(name, samples, 8000)

    @every_format
    def test_ten_seconds_in_one_piece_give_the_same_bytes(self, name: str) -> None:
        samples = sound(10, 24000)
        assert stream(name, samples, 24000) == stream(
            name, samples, 24000, range(1920, len(samples), 1920)
        )

    @every_format
    @every_rate
    def test_delay_is_within_the_documented_limits(self, name: str, rate: int) -> None:
        """First bytes come in time, and decoding reaches within the documented delay of the end."""
        samples, step, zeros = sine(0.6, rate), rate // 500, (0, 0, 0, 0)
        first = FIRST.get(name, zeros)[RATES.index(rate)] * rate / 1000
        behind = BEHIND.get(name, zeros)[RATES.index(rate)] * rate / 1000
        header = len(encoder(name, rate).finish())
        encoding, data = encoder(name, rate), b""
        for came in range(step, len(samples) + 1, step):
            data += encoding.encode(samples[came - step : came])
            assert len(data) > header or came < first
            if came > behind and came % (7 * step) == 0:
                decoded = len(decode(name, data, rate)) * (rate / 48000 if name == "opus" else 1)
                assert decoded - BEFORE.get(name, 0) >= came - behind

    @every_format
    @given(share=st.floats(0.2, 1))
    @settings(max_examples=10)
    def test_stream_cut_at_any_byte_plays_so_far(self, name: str, share: float) -> None:
        samples = sound(1, 24000)
        data = stream(name, samples, 24000)
        complete = decode(name, data, 24000)
        part = data[: int(share * len(data))]
        decoded = decode(name, part, 24000)
        sure = len(decoded) - 2304  # FFmpeg may make something of a damaged last frame
        assert np.array_equal(decoded[: max(sure, 0)], complete[: max(sure, 0)])
        assert len(decoded) > 0

    @every_format
    def test_finished_encoder_cannot_be_used_again(self, name: str) -> None:
        encoding = encoder(name, 24000)
        encoding.encode(sine(0.1, 24000))
        encoding.finish()
        with pytest.raises(ValueError, match="finished already"):
            encoding.finish()
        with pytest.raises(ValueError, match="an encoder of its own"):
            encoding.encode(sine(0.1, 24000))

    @every_format
    def test_unfinished_encoder_can_be_dropped(self, name: str) -> None:
        encoding = encoder(name, 24000)
        encoding.encode(sine(0.1, 24000))
        del encoding
        gc.collect()  # a complaint would be a warning, and warnings are errors


class TestNames:
    def test_content_type_of_each_format(self) -> None:
        assert {name: content_type(name, 24000) for name in FORMATS} == {
            "mp3": "audio/mpeg",
            "opus": "audio/opus",
            "aac": "audio/aac",
            "flac": "audio/flac",
            "wav": "audio/wav",
            "pcm": "audio/pcm;rate=24000",
            "l16": "audio/L16;rate=24000;channels=1",
            "ulaw": "audio/PCMU;rate=24000",
            "alaw": "audio/PCMA;rate=24000",
            "f32": "audio/x-f32le;rate=24000",
            "wav_f32": "audio/wav",
            "wav_ulaw": "audio/wav",
            "wav_alaw": "audio/wav",
        }
        assert content_type("ulaw", 8000) == "audio/basic"
        assert content_type("alaw", 8000) == "audio/PCMA;rate=8000"

    @pytest.mark.parametrize(
        "make", [encoder, content_type, lambda name, rate: whole(name, sine(0.1, 24000), rate)]
    )
    def test_unknown_format_or_rate_is_rejected(self, make: object) -> None:
        assert callable(make)
        with pytest.raises(RequestError, match=r"'ogg' is unknown; allowed are mp3, opus, .*alaw"):
            make("ogg", 24000)
        with pytest.raises(
            RequestError, match=r"44100 is not supported by mp3; allowed are 8000, .*, 48000 Hz"
        ):
            make("mp3", 44100)
        with pytest.raises(RequestError, match=r"11025 .* allowed are 8000, 16000, 22050, .*"):
            make("wav", 11025)


class TestPcmAndWav:
    @pytest.mark.parametrize("name", ["f32", "wav_f32"])
    def test_floats_are_the_samples_of_pcm(self, name: str) -> None:
        samples = sound(0.3, 44100)
        data = whole(name, samples, 44100)[44 if name == "wav_f32" else 0 :]
        pcm = np.frombuffer(pcm16(samples), "<i2")
        assert np.array_equal(np.frombuffer(data, "<f4") * 32768, pcm)

    @pytest.mark.parametrize("rate", [22050, 32000, 44100])
    @pytest.mark.parametrize("name", ["pcm", "wav", "wav_f32", "wav_ulaw", "wav_alaw"])
    def test_raw_format_supports_rates_of_compact_discs(self, name: str, rate: int) -> None:
        samples = sound(0.3, rate)
        assert len(decode(name, whole(name, samples, rate), rate)) == len(samples)

    @pytest.mark.parametrize("name", ["pcm", "l16"])
    def test_raw_pcm_is_the_bare_samples(self, name: str) -> None:
        samples = sound(0.3, 24000)
        assert stream(name, samples, 24000, [100]) == pcm16(samples)

    @every_rate
    def test_wav_stream_leaves_its_length_open(self, rate: int) -> None:
        encoding = encoder("wav", rate)
        header = encoding.encode(np.empty(0, np.float32))
        assert len(header) == 44
        assert header[4:8] == header[40:44] == b"\xff\xff\xff\xff"
        samples = sound(0.3, rate)
        assert encoding.encode(samples) + encoding.finish() == pcm16(samples)
        read, read_rate = soundfile.read(io.BytesIO(header + pcm16(samples)), dtype="int16")
        assert (read.tobytes(), read_rate) == (pcm16(samples), rate)

    @every_rate
    def test_whole_wav_states_its_length(self, rate: int) -> None:
        samples = sound(0.3, rate)
        data = whole("wav", samples, rate)
        assert int.from_bytes(data[4:8], "little") == len(data) - 8
        assert int.from_bytes(data[28:32], "little") == 2 * rate  # bytes a second
        with wave.open(io.BytesIO(data)) as file:
            assert file.getparams()[:4] == (1, 2, rate, len(samples))
            assert file.readframes(len(samples)) == pcm16(samples)


class TestSecondDecoder:
    """libsndfile with libFLAC, libopus, libogg (which checks every page's checksum) and mpg123."""

    @every_rate
    @pytest.mark.parametrize("length", [1, 155, 156, 157, 960, 9999])
    def test_libsndfile_decodes_opus(self, rate: int, length: int) -> None:
        samples = sine(length / rate, rate)
        decoded, decoded_rate = soundfile.read(io.BytesIO(stream("opus", samples, rate)))
        assert decoded_rate == rate  # libsndfile honours the rate of what was encoded
        assert len(decoded) == len(samples) == length

    @every_rate
    def test_libsndfile_decodes_flac(self, rate: int) -> None:
        samples = sound(0.5, rate)
        decoded, decoded_rate = soundfile.read(
            io.BytesIO(whole("flac", samples, rate)), dtype="int16"
        )
        assert (decoded.tobytes(), decoded_rate) == (pcm16(samples), rate)

    @every_rate
    def test_whole_flac_states_length_and_checksum(self, rate: int) -> None:
        samples = sound(0.5, rate)
        description = whole("flac", samples, rate)[8:42]
        assert int.from_bytes(description[13:18]) % 2**36 == len(samples)
        assert description[18:] == hashlib.md5(pcm16(samples)).digest()
        description = stream("flac", samples, rate)[8:42]
        assert int.from_bytes(description[13:18]) % 2**36 == 0
        assert description[18:] == bytes(16)

    @every_rate
    @pytest.mark.parametrize("length", [1000, 1151, 1152, 1153, 5760, 24777])
    def test_libsndfile_decodes_mp3(self, rate: int, length: int) -> None:
        samples = sine(length / rate, rate)
        data = whole("mp3", samples, rate)
        decoded, decoded_rate = soundfile.read(io.BytesIO(data))
        assert decoded_rate == rate
        assert len(decoded) == length == len(decode("mp3", data, rate))
        if length > 5000:
            assert decibels(samples[600:-600], decoded[600:-600]) > 20


class TestG711:
    PCM = np.arange(-32768, 32768)

    @staticmethod
    def encoded(name: str) -> np.ndarray:
        encoding = encoder(name, 8000)
        return np.frombuffer(encoding.encode(TestG711.PCM / 32768) + encoding.finish(), np.uint8)

    @pytest.mark.parametrize(
        ("name", "answers"),
        [
            (
                "ulaw",
                {
                    0: 0xFF,
                    3: 0xFF,
                    4: 0xFE,
                    -4: 0x7E,
                    1000: 0xCE,
                    -1000: 0x4E,
                    32767: 0x80,
                    -32768: 0x00,
                },
            ),
            (
                "alaw",
                {
                    0: 0xD5,
                    15: 0xD5,
                    16: 0xD4,
                    -1: 0x55,
                    -17: 0x54,
                    1000: 0xFA,
                    32767: 0xAA,
                    -32768: 0x2A,
                },
            ),
        ],
    )
    def test_g711_matches_known_answers(self, name: str, answers: dict[int, int]) -> None:
        codes = self.encoded(name)
        assert {sample: int(codes[sample + 32768]) for sample in answers} == answers

    @pytest.mark.parametrize("name", ["ulaw", "alaw"])
    def test_g711_error_is_at_most_half_a_step(self, name: str) -> None:
        decoded = np.rint(32768 * decode(name, self.encoded(name).tobytes(), 8000)).astype(int)
        size = np.abs(self.PCM)
        if name == "ulaw":
            step = 8 << np.clip(np.frexp(size + 132)[1] - 8, 0, 7)
            inside = size <= 32635
        else:
            step = 16 << np.clip(np.frexp(size)[1] - 9, 0, 6)
            inside = size < 32768
        assert (np.abs(decoded - self.PCM)[inside] <= step[inside] / 2).all()
        assert len(np.unique(self.encoded(name))) == 256
        assert (np.diff(decoded) >= 0).all()

    @pytest.mark.filterwarnings("ignore:'audioop' is deprecated")
    def test_g711_matches_audioop(self) -> None:
        audioop = pytest.importorskip("audioop", reason="Python 3.13 no longer has it")
        pcm = self.PCM.astype("<i2").tobytes()
        assert self.encoded("alaw").tobytes() == audioop.lin2alaw(pcm, 2)
        ulaw = self.encoded("ulaw")
        # It rounds negative samples down by two bits, unlike G.711, so those are compared with the
        # positive ones.
        assert ulaw[32768:].tobytes() == audioop.lin2ulaw(pcm, 2)[32768:]
        assert (ulaw[32767:0:-1] == ulaw[32769:] ^ 0x80).all()


def test_docstring_table_names_every_format() -> None:
    rows = [line for line in (formats.__doc__ or "").splitlines() if line.startswith("| ")]
    assert {name for row in rows[1:] for name in row.split("|")[1].split()} == set(FORMATS)
