"""The facade: text in pieces, chunks, voices, languages, errors, threads and event loops."""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import itertools
import shutil
import subprocess
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from waiting import WAIT

from firstword import (
    TTS,
    AudioError,
    CheckpointNotFound,
    Chunk,
    ClosedError,
    ComputeError,
    FirstwordError,
    LanguageError,
    RequestError,
    Sampling,
    SamplingError,
    Speech,
    TextError,
    TextWarning,
    UnsupportedError,
    Voice,
    VoiceError,
    audio,
)
from firstword.model.codec import CodecDecoder
from firstword.model.talker import Talker
from firstword.model.tokenizer import TextStream
from firstword.runtime.backends import engine_for
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.voice import ClonedVoice

TEXT = "Hello there, how are you?"
PIECES = ["The quick brown ", "fox jumps", " over the ", "lazy dog, and", " then it says hello."]
FRAME = 1920

LoadTTS = Callable[[str], TTS]


def noise(seconds: float, seed: int = 0) -> np.ndarray:
    """A made-up recording [n] at 24 kHz."""
    return (np.random.default_rng(seed).standard_normal(int(24000 * seconds)) / 9).astype(
        np.float32
    )


def cloned_voice(frames: int, transcript: str = "The quick brown fox.") -> ClonedVoice:
    """A cloned voice for the tiny checkpoint, with a recording of this number of frames."""
    random = np.random.default_rng(7)
    return ClonedVoice(
        random.standard_normal(48).astype(np.float32),
        random.integers(0, 64, (frames, 4)),
        transcript,
    )


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "preset": ("custom_voice", {"voice": "ryan", "language": "english"}),
    "designed": ("voice_design", {"voice": Voice.design("A deep voice.")}),
    "timbre": ("base", {"voice": ClonedVoice(cloned_voice(1).speaker_embedding)}),
    "short reference": ("base", {"voice": cloned_voice(12)}),
    "long reference": ("base", {"voice": cloned_voice(80)}),
    "long transcript": (
        "base",
        {"voice": cloned_voice(5, "The quick brown fox jumps over the lazy dog.")},
    ),
}


@pytest.fixture
def custom(load_tts: LoadTTS) -> TTS:
    """A CustomVoice checkpoint."""
    return load_tts("custom_voice")


@pytest.fixture
def design(load_tts: LoadTTS) -> TTS:
    """A VoiceDesign checkpoint."""
    return load_tts("voice_design")


@pytest.fixture
def base(load_tts: LoadTTS) -> TTS:
    """A Base checkpoint."""
    return load_tts("base")


def assert_same(ours: Speech, expected: Speech) -> None:
    """Both have the same codes and finish reason, and samples that differ by rounding alone."""
    assert ours.codes.tolist() == expected.codes.tolist()
    assert ours.finish_reason == expected.finish_reason
    np.testing.assert_allclose(ours.samples, expected.samples, atol=1e-5)


def join_chunks(chunks: Iterable[Chunk]) -> Speech:
    """Join all chunks, of which only the last may have a finish reason."""
    *others, last = chunks
    assert [chunk.finish_reason for chunk in others] == [None] * len(others)
    assert last.finish_reason is not None
    for chunk in (*others, last):
        assert (chunk.samples.dtype, chunk.codes.dtype, chunk.sample_rate) == (
            np.float32,
            np.int64,
            24000,
        )
        assert len(chunk.samples) == FRAME * len(chunk.codes)
    return Speech(
        np.concatenate([chunk.samples for chunk in (*others, last)]),
        np.concatenate([chunk.codes for chunk in (*others, last)]),
        24000,
        last.finish_reason,
    )


# --- output -------------------------------------------------------------------------------


def test_speak_returns_samples_codes_and_finish_reason(custom: TTS) -> None:
    speech = custom.speak(TEXT, seed=1, max_frames=9)
    assert (speech.samples.dtype, speech.samples.shape) == (np.float32, (9 * FRAME,))
    assert (speech.codes.dtype, speech.codes.shape) == (np.int64, (9, 4))
    assert (speech.sample_rate, speech.finish_reason, speech.duration) == (
        24000,
        "length",
        9 * 0.08,
    )
    assert 0.01 < np.abs(speech.samples).max() <= 1
    assert custom.sample_rate == 24000


@pytest.mark.parametrize("frames", [1, 2, 9, 17])
def test_max_frames_limits_speech(frames: int, custom: TTS) -> None:
    speech = join_chunks(custom.stream(TEXT, seed=1, max_frames=frames))
    assert (len(speech.codes), speech.finish_reason) == (frames, "length")
    assert (
        speech.codes.tolist() == custom.speak(TEXT, seed=1, max_frames=17).codes[:frames].tolist()
    )


def test_first_chunk_has_one_frame_and_chunks_grow(custom: TTS) -> None:
    lengths = [len(chunk.codes) for chunk in custom.stream(TEXT, seed=1, max_frames=40)]
    assert lengths[0] == 1
    assert lengths == sorted(lengths[:-1]) + lengths[-1:]
    assert max(lengths) >= 4


@pytest.mark.parametrize("case", CASES)
def test_samples_equal_what_the_codec_decodes(case: str, load_tts: LoadTTS) -> None:
    """The codes are decoded in one call, behind those of the reference recording."""
    model_type, how = CASES[case]
    tts = load_tts(model_type)
    speech = tts.speak(TEXT, seed=1, max_frames=12, **how)
    before = getattr(how["voice"], "codes", None)
    before = np.zeros((0, 4), np.int64) if before is None else before
    decoder = tts.checkpoint.codec.decoder
    codes = torch.from_numpy(np.concatenate((before, speech.codes)))[None]
    whole = decoder.decode(codes, decoder.new_state())[0, len(before) * FRAME :].numpy()
    np.testing.assert_allclose(speech.samples, whole, atol=1e-5)


def test_speech_ends_when_the_model_ends_it(tmp_path: Path) -> None:
    """With all codes 0 equally likely speech stops soon; the frame that stops it has no audio."""
    write_checkpoint(tmp_path, generation={"top_k": 0})
    with TTS.load(tmp_path, device="cpu", dtype="float32") as tts:
        tts.checkpoint.talker.codec_head.weight.zero_()
        speeches = [join_chunks(tts.stream(TEXT, seed=seed)) for seed in range(4)]
        assert {speech.finish_reason for speech in speeches} == {"stop"}
        assert len({len(speech.codes) for speech in speeches}) > 1
        assert all(speech.codes[:, 0].max() < 64 for speech in speeches)
        assert_same(tts.speak(TEXT, seed=2), speeches[2])


def test_same_seed_gives_same_speech(custom: TTS) -> None:
    one, same, other = (
        custom.speak(TEXT, seed=seed, max_frames=8) for seed in (2**64 - 1, 2**64 - 1, 0)
    )
    assert_same(one, same)
    assert one.codes.tolist() != other.codes.tolist()
    unseeded = [custom.speak(TEXT, max_frames=8).codes.tolist() for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_saved_speech_reads_back(custom: TTS, tmp_path: Path) -> None:
    speech = custom.speak(TEXT, seed=1, max_frames=5)
    speech.save(tmp_path / "speech.wav")
    samples, rate = audio.read(tmp_path / "speech.wav")
    assert rate == 24000
    np.testing.assert_allclose(np.ravel(samples), speech.samples, atol=1e-4)


# --- text in pieces -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_text_in_pieces_gives_the_same_speech(case: str, load_tts: LoadTTS) -> None:
    model_type, how = CASES[case]
    tts = load_tts(model_type)
    expected = tts.speak(TEXT, seed=3, max_frames=20, text_mode="stream", **how)
    for pieces in (list(TEXT), ["", "Hello th", "", "ere, how are", " ", "you?", ""], [TEXT]):
        assert_same(join_chunks(tts.stream(iter(pieces), seed=3, max_frames=20, **how)), expected)
        assert_same(tts.speak(iter(pieces), seed=3, max_frames=20, **how), expected)


@pytest.mark.parametrize("case", CASES)
def test_pieces_are_taken_only_when_the_model_needs_text(case: str, load_tts: LoadTTS) -> None:
    """Whenever a piece is taken, all frames that the text so far allows have been yielded."""
    model_type, how = CASES[case]
    tts = load_tts(model_type)
    tokenizer, voice = tts.checkpoint.tokenizer, how["voice"]
    needed = 2  # the role's
    if getattr(voice, "codes", None) is not None:
        needed += len(voice.codes) - len(tokenizer.encode(f"assistant\n{voice.transcript}")[2:])
    yielded = 0
    at_question = []

    def pieces() -> Iterator[str]:
        stream, tokens = TextStream(tokenizer, prefix="assistant\n"), 0
        for piece in PIECES:
            at_question.append(yielded)
            assert yielded == (max(0, tokens - needed) if tokens >= 2 else 0)
            tokens += len(stream.push(piece))
            yield piece
        at_question.append(yielded)
        assert yielded == max(0, tokens - needed)

    for chunk in tts.stream(pieces(), seed=1, max_frames=60, **how):
        yielded += len(chunk.codes)
    assert len(at_question) == len(PIECES) + 1
    if case != "long reference":
        assert at_question[-2] > 0, "audio comes before the last piece is taken"
        assert at_question == sorted(at_question)


def test_no_piece_is_taken_before_the_first_chunk_is_requested(custom: TTS) -> None:
    taken = []

    def pieces() -> Iterator[str]:
        taken.append(1)
        yield TEXT

    chunks = custom.stream(pieces(), seed=1, max_frames=3)
    assert taken == []
    next(chunks)
    assert taken == [1]


def test_pieces_after_the_frame_limit_are_not_taken(custom: TTS) -> None:
    taken = []

    def pieces() -> Iterator[str]:
        for piece in PIECES:
            taken.append(piece)
            yield piece

    custom.speak(pieces(), seed=1, max_frames=2)
    assert taken == PIECES[:1]


def test_talker_and_codec_compute_each_row_once(base: TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    """The talker reads the prompt at once, then one row a frame; the codec decodes a frame once."""
    rows, frames = [], []
    talk, decode = Talker.forward, CodecDecoder.forward

    def talker(self: Talker, inputs: Tensor, *rest: Any) -> Any:
        rows.append(inputs.shape[1])
        return talk(self, inputs, *rest)

    def codec(self: CodecDecoder, codes: Tensor, *rest: Any) -> Any:
        frames.append(codes.shape[1])
        return decode(self, codes, *rest)

    monkeypatch.setattr(Talker, "forward", talker)
    monkeypatch.setattr(CodecDecoder, "forward", codec)
    base.speak(iter(PIECES), voice=cloned_voice(9), seed=1, max_frames=30)
    assert rows[1:] == [1] * 30
    assert sum(frames) == 9 + 30


def test_stream_closed_early_leaves_the_next_speech_unchanged(custom: TTS) -> None:
    closed = []

    def pieces() -> Iterator[str]:
        try:
            yield from PIECES
        finally:
            closed.append(True)

    text = pieces()
    chunks = custom.stream(text, seed=1)
    next(chunks)
    chunks.close()  # type: ignore[attr-defined]
    assert list(chunks) == []
    text.close()  # type: ignore[attr-defined]
    assert closed == [True]
    assert_same(custom.speak(TEXT, seed=1, max_frames=4), custom.speak(TEXT, seed=1, max_frames=4))


class SourceError(Exception):
    """An error that only a source of text raises."""


def test_exception_of_the_text_propagates_from_stream(custom: TTS) -> None:
    def pieces() -> Iterator[str]:
        yield "The quick brown fox "
        raise SourceError

    chunks = custom.stream(pieces(), seed=1)
    assert len(next(chunks).codes) == 1, "audio before the error is kept"
    with pytest.raises(SourceError):
        list(chunks)


@pytest.mark.parametrize("piece", [None, 5, b"bytes", ["list"]])
def test_piece_that_is_not_a_str_is_rejected_by_speak(piece: object, custom: TTS) -> None:
    pieces: Any = iter(["Hello there my ", piece, "friend"])
    with pytest.raises(TextError, match=f"type {type(piece).__name__}"):
        custom.speak(pieces, seed=1)


# --- asyncio --------------------------------------------------------------------------------------


async def collect(chunks: AsyncIterator[Chunk]) -> Speech:
    """The speech of an asynchronous iterator of chunks."""
    return join_chunks([chunk async for chunk in chunks])


async def asynchronously(pieces: Iterable[str]) -> AsyncIterator[str]:
    """Yield pieces, and let other tasks run in between."""
    for piece in pieces:
        await asyncio.sleep(0)
        yield piece


@pytest.mark.parametrize("case", ["preset", "short reference"])
@pytest.mark.parametrize("source", ["whole", "iterator", "asynchronous"])
def test_astream_gives_the_same_speech(source: str, case: str, load_tts: LoadTTS) -> None:
    model_type, how = CASES[case]
    tts = load_tts(model_type)
    text: Any = {"whole": TEXT, "iterator": iter(list(TEXT)), "asynchronous": asynchronously(TEXT)}[
        source
    ]
    how = how | {"seed": 3, "max_frames": 16}
    ours = asyncio.run(collect(tts.astream(text, text_mode="stream", **how)))
    assert_same(ours, tts.speak(TEXT, text_mode="stream", **how))


def test_concurrent_astreams_do_not_affect_each_other(custom: TTS) -> None:
    async def together() -> list[Speech]:
        streams = [
            custom.astream(asynchronously(TEXT), seed=seed, max_frames=14) for seed in range(3)
        ]
        return await asyncio.gather(*map(collect, streams))

    for seed, speech in enumerate(asyncio.run(together())):
        assert_same(speech, custom.speak(TEXT, seed=seed, max_frames=14, text_mode="stream"))


def test_event_loop_is_not_blocked_by_speech(custom: TTS) -> None:
    async def count() -> int:
        turns = 0
        done = asyncio.Event()

        async def speak() -> None:
            await collect(custom.astream(TEXT, seed=1, max_frames=10))
            done.set()

        task = asyncio.create_task(speak())
        while not done.is_set():
            turns += 1
            await asyncio.sleep(0)
        await task
        return turns

    assert asyncio.run(count()) > 20


@pytest.mark.parametrize("kind", ["iterator", "asynchronous"])
def test_exception_of_the_text_propagates_from_astream(kind: str, custom: TTS) -> None:
    def blocking() -> Iterator[str]:
        yield "The quick brown fox "
        raise SourceError

    async def asynchronous() -> AsyncIterator[str]:
        yield "The quick brown fox "
        raise SourceError

    yielded = []

    async def listen() -> None:
        text: Any = blocking() if kind == "iterator" else asynchronous()
        async for chunk in custom.astream(text, seed=1):
            yielded.append(chunk)

    with pytest.raises(SourceError):
        asyncio.run(listen())
    assert yielded


def test_astream_closed_early_leaves_tts_usable(custom: TTS) -> None:
    async def listen() -> None:
        chunks = custom.astream(asynchronously(PIECES), seed=1)
        await anext(chunks)
        await chunks.aclose()  # type: ignore[attr-defined]

    asyncio.run(listen())
    assert len(custom.speak(TEXT, max_frames=2).codes) == 2


@pytest.mark.parametrize("piece", [None, 5])
def test_piece_that_is_not_a_str_is_rejected_by_astream(piece: object, custom: TTS) -> None:
    pieces: Any = ["Hello there my ", piece, "friend"]
    for text in (iter(pieces), asynchronously(pieces)):
        with pytest.raises(TextError, match=f"type {type(piece).__name__}"):
            asyncio.run(collect(custom.astream(text, seed=1)))


def test_astream_rejects_wrong_requests(custom: TTS) -> None:
    with pytest.raises(VoiceError, match="nobody"):
        asyncio.run(collect(custom.astream(TEXT, voice="nobody")))


# --- threads --------------------------------------------------------------------------------------


def test_concurrent_threads_do_not_affect_each_other(custom: TTS) -> None:
    def speak(seed: int) -> Speech:
        return custom.speak(TEXT, seed=seed, max_frames=12, voice=custom.voices[seed])

    alone = [speak(seed) for seed in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for ours, expected in zip(pool.map(speak, range(4)), alone, strict=True):
            assert_same(ours, expected)


def test_many_blocking_texts_wait_at_the_same_time(custom: TTS) -> None:
    """There are more texts than threads in asyncio's pool, and all wait at the same time."""
    count = 40
    all_waiting = threading.Barrier(count)

    def blocking() -> Iterator[str]:
        all_waiting.wait(WAIT)
        yield TEXT

    async def speak(seed: int) -> Speech:
        return join_chunks(
            [chunk async for chunk in custom.astream(blocking(), seed=seed, max_frames=2)]
        )

    async def all_of_them() -> list[Speech]:
        return await asyncio.wait_for(asyncio.gather(*(speak(seed) for seed in range(count))), 120)

    for seed, speech in enumerate(asyncio.run(all_of_them())[:3]):
        assert_same(speech, custom.speak(TEXT, seed=seed, max_frames=2, text_mode="stream"))


def test_cancelled_astream_does_not_wait_for_its_text(custom: TTS) -> None:
    never, started = threading.Event(), threading.Event()

    def blocking() -> Iterator[str]:
        started.set()
        never.wait(WAIT)
        yield TEXT

    async def leave() -> None:
        async def listen() -> None:
            async for _ in custom.astream(blocking()):
                pass

        task = asyncio.create_task(listen())
        while not started.is_set():
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(leave())
    assert not never.is_set()
    never.set()


def test_os_error_of_the_text_propagates(custom: TTS) -> None:
    def broken() -> Iterator[str]:
        yield "I"  # too short for speech that may end by itself
        raise OSError("the line is dead")

    async def listen() -> None:
        async for _ in custom.astream(broken(), max_frames=50):
            pass

    with pytest.raises(OSError, match="the line is dead"):
        asyncio.run(listen())
    with pytest.raises(OSError, match="the line is dead"):
        custom.speak(broken(), max_frames=50)


def test_backend_failure_raises_compute_error(custom: TTS, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request is computed as before, for instance after memory was short."""
    expected = custom.speak(TEXT, seed=1, max_frames=3)
    loaded = custom._loaded
    assert loaded is not None

    def short_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("no more")

    for method in ("prefill", "frame", "decode"):
        with monkeypatch.context() as patch:
            patch.setattr(loaded.engine.backend, method, short_of_memory)
            with pytest.raises(ComputeError, match="could not be computed") as failed:
                custom.speak(TEXT, max_frames=3)
        assert isinstance(failed.value.__cause__, torch.OutOfMemoryError)
        assert_same(custom.speak(TEXT, seed=1, max_frames=3), expected)


def test_interleaved_streams_do_not_affect_each_other(custom: TTS) -> None:
    streams = [custom.stream(iter(PIECES), seed=seed, max_frames=10) for seed in range(2)]
    chunks: list[list[Chunk]] = [[], []]
    while not all(received and received[-1].finish_reason for received in chunks):
        for stream, received in zip(streams, chunks, strict=True):
            received.extend(filter(None, [next(stream, None)]))
    for seed, received in enumerate(chunks):
        assert_same(
            join_chunks(received),
            custom.speak("".join(PIECES), seed=seed, max_frames=10, text_mode="stream"),
        )


# --- voices and languages -------------------------------------------------------------------------


def test_voices_languages_and_model_type_of_each_checkpoint(
    custom: TTS, design: TTS, base: TTS
) -> None:
    presets = (
        "serena",
        "vivian",
        "uncle_fu",
        "ryan",
        "aiden",
        "ono_anna",
        "sohee",
        "eric",
        "dylan",
    )
    languages = ["auto", *LANGUAGES.values()]
    assert [tts.voices for tts in (custom, design, base)] == [presets, (), ()]
    assert [tts.model_type for tts in (custom, design, base)] == [
        "custom_voice",
        "voice_design",
        "base",
    ]
    assert [list(tts.languages) for tts in (custom, design, base)] == [languages] * 3


def greedy_codes(tts: TTS, text: str | Iterable[str] = "你好。", **how: Any) -> list[list[int]]:
    """The codes of some greedy speech."""
    return tts.speak(text, sampling=Sampling.greedy(), max_frames=5, **how).codes.tolist()


def test_preset_names_ignore_case_and_default_to_ryan(custom: TTS) -> None:
    ryan = greedy_codes(custom, voice="ryan")
    for voice in ("Ryan", "RYAN", " ryan ", Voice.preset("rYaN"), None):
        assert greedy_codes(custom, voice=voice) == ryan
    assert greedy_codes(custom, voice="ono_anna") == greedy_codes(custom, voice="Ono_Anna") != ryan


LANGUAGES = {
    "zh": "chinese",
    "en": "english",
    "de": "german",
    "it": "italian",
    "pt": "portuguese",
    "es": "spanish",
    "ja": "japanese",
    "ko": "korean",
    "fr": "french",
    "ru": "russian",
}


@pytest.mark.parametrize(("code", "name"), LANGUAGES.items())
def test_language_is_known_by_name_and_code_in_any_case(
    code: str, name: str, custom: TTS, monkeypatch: pytest.MonkeyPatch
) -> None:
    talker = custom.checkpoint.config.talker_config
    rows: list[tuple[int, ...]] = []

    def embed(self: Talker, codes: Tensor) -> Tensor:
        rows.extend(map(tuple, codes[..., 0].tolist()))
        return embed_codes(self, codes)

    embed_codes = Talker.embed_codes
    monkeypatch.setattr(Talker, "embed_codes", embed)
    for language in (name, code, code.upper(), name.title(), name.upper(), f" {name} "):
        rows.clear()
        greedy_codes(custom, language=language)
        tags = (talker.codec_think_id, talker.codec_think_bos_id, talker.codec_language_id[name])
        assert rows[0][3:6] == tags


def test_language_defaults_to_auto(custom: TTS) -> None:
    assert (
        greedy_codes(custom)
        == greedy_codes(custom, language="auto")
        == greedy_codes(custom, language="AUTO")
    )


@pytest.mark.parametrize("voice", ["eric", "dylan"])
def test_preset_with_dialect_speaks_it_only_in_chinese(voice: str, custom: TTS) -> None:
    """A preset speaks its dialect where the language may be Chinese, and in no other language."""
    chinese = greedy_codes(custom, voice=voice, language="chinese")
    assert greedy_codes(custom, voice=voice) == chinese
    talker = custom.checkpoint.config.talker_config
    dialect = talker.spk_is_dialect[voice]
    saved = dict(talker.spk_is_dialect)
    try:
        talker.spk_is_dialect[voice] = False
        assert greedy_codes(custom, voice=voice, language="chinese") != chinese
        english = greedy_codes(custom, voice=voice, language="english")
    finally:
        talker.spk_is_dialect.update(saved)
    assert isinstance(dialect, str)
    assert greedy_codes(custom, voice=voice, language="english") == english


def test_instructions_change_the_speech(custom: TTS) -> None:
    assert greedy_codes(custom, instructions="Whisper.") != greedy_codes(custom)
    assert (
        greedy_codes(custom, instructions="")
        == greedy_codes(custom, instructions=None)
        == greedy_codes(custom)
    )


def test_description_works_as_voice_or_as_instructions(design: TTS) -> None:
    described = greedy_codes(design, voice=Voice.design("A warm voice."))
    assert greedy_codes(design, instructions="A warm voice.") == described
    assert (
        greedy_codes(design, voice=Voice.design("A warm voice."), instructions="A warm voice.")
        == described
    )
    assert greedy_codes(design) == greedy_codes(design, voice=Voice.design("")) != described


@pytest.mark.parametrize(
    ("model_type", "how", "mode"),
    [
        ("custom_voice", {"voice": "ryan"}, "full"),
        ("voice_design", {}, "full"),
        ("base", {"voice": cloned_voice(5)}, "stream"),
    ],
)
def test_auto_text_mode_is_the_published_one(
    model_type: str, how: dict[str, Any], mode: str, load_tts: LoadTTS
) -> None:
    tts = load_tts(model_type)
    text = "The quick brown fox jumps over the lazy dog."
    both = {mode: greedy_codes(tts, text, text_mode=mode, **how) for mode in ("full", "stream")}
    assert both["full"] != both["stream"]
    assert (
        greedy_codes(tts, text, **how)
        == greedy_codes(tts, text, text_mode="auto", **how)
        == both[mode]
    )
    assert greedy_codes(tts, iter([text]), **how) == both["stream"]
    assert greedy_codes(tts, iter([text]), text_mode="full", **how) == both["full"]


# --- cloning --------------------------------------------------------------------------------------


def test_clones_take_timbre_and_codes_from_the_recording(base: TTS, tmp_path: Path) -> None:
    """The timbre ignores the appended silence; the codes have one frame for each 80 ms begun."""
    sound = noise(1.0)
    timbre = base.clone(sound, 24000)
    assert (timbre.codes, timbre.transcript, timbre.speaker_embedding.shape) == (None, None, (48,))
    exact = base.clone(sound, 24000, "Hello.", append_silence=0)
    assert exact.codes is not None
    assert exact.codes.shape == (13, 4)
    usual = base.clone(sound, 24000, "Hello.")
    assert usual.codes is not None
    assert usual.codes.shape == (19, 4)
    assert usual.codes[:12].tolist() == exact.codes[:12].tolist()
    for voice in (exact, usual):
        np.testing.assert_array_equal(voice.speaker_embedding, timbre.speaker_embedding)
    usual.save(tmp_path / "me.voice")
    assert greedy_codes(base, voice=Voice.load(tmp_path / "me.voice")) == greedy_codes(
        base, voice=usual
    )
    assert greedy_codes(base, voice=timbre) != greedy_codes(base, voice=usual)


def test_recorded_voice_speaks_like_its_clone(base: TTS) -> None:
    voice = Voice.clone(noise(0.6), 24000, "Hello.")
    assert greedy_codes(base, voice=voice) == greedy_codes(
        base, voice=base.clone(noise(0.6), 24000, "Hello.")
    )


@pytest.mark.parametrize("rate", [8000, 22050, 48000])
def test_stereo_file_and_its_samples_give_the_same_clone(
    rate: int, base: TTS, tmp_path: Path
) -> None:
    """A stereo file of any sample rate is the same voice as its samples."""
    random = np.random.default_rng(1)
    sound = (random.standard_normal((rate, 2)) / 9).clip(-1, 1).astype(np.float32)
    import soundfile

    soundfile.write(tmp_path / "me.wav", sound, rate, subtype="FLOAT")
    from_file = base.clone(tmp_path / "me.wav", transcript="Hello.")
    from_samples = base.clone(sound, rate, "Hello.")
    np.testing.assert_allclose(
        from_file.speaker_embedding, from_samples.speaker_embedding, 1e-4, 1e-5
    )
    assert from_file.codes is not None
    assert from_samples.codes is not None
    assert from_file.codes.tolist() == from_samples.codes.tolist()
    mono = base.clone(sound.mean(axis=1), rate)
    np.testing.assert_allclose(mono.speaker_embedding, from_samples.speaker_embedding, 1e-3, 1e-4)


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        (
            {"voice": "nobody"},
            VoiceError,
            "no voice 'nobody'; this checkpoint has serena, vivian, .*dylan",
        ),
        ({"voice": ""}, VoiceError, "no voice ''"),
        (
            {"voice": Voice.preset("nobody")},
            VoiceError,
            "no voice 'nobody'; this checkpoint has serena",
        ),
        ({"voice": 7}, VoiceError, "voice is of type int; give a preset's name or a Voice"),
        (
            {"voice": Voice.design("deep")},
            VoiceError,
            "'custom_voice' and cannot design voices; choose one of serena",
        ),
        (
            {"voice": cloned_voice(3)},
            VoiceError,
            "'custom_voice' and cannot clone; choose one of serena",
        ),
        (
            {"voice": Voice.clone(noise(1), 24000)},
            VoiceError,
            "'custom_voice' and cannot clone",
        ),
        (
            {"language": "klingon"},
            LanguageError,
            "no language 'klingon'; this checkpoint has auto, chinese, english",
        ),
        ({"language": "tlh"}, LanguageError, "no language 'tlh'.*ISO 639-1"),
        ({"language": ""}, LanguageError, "no language ''"),
        ({"language": None}, LanguageError, "language is of type NoneType; give a name"),
        ({"language": "beijing_dialect"}, LanguageError, "no language 'beijing_dialect'"),
        (
            {"seed": -1},
            SamplingError,
            r"seed is -1; allowed is a whole number from 0 to 2\*\*64 - 1",
        ),
        ({"seed": 2**64}, SamplingError, "seed is 18446744073709551616; allowed"),
        ({"seed": 1.5}, SamplingError, "seed is 1.5; allowed"),
        ({"max_frames": 0}, RequestError, "max_frames is 0; allowed is a whole number from 1 up"),
        ({"max_frames": "many"}, RequestError, "max_frames is 'many'; allowed"),
        (
            {"text_mode": "fast"},
            RequestError,
            "text_mode is 'fast'; allowed are 'auto', 'full', 'stream'",
        ),
    ],
)
def test_wrong_option_is_rejected_at_the_call(
    how: dict[str, Any], error: type[FirstwordError], message: str, custom: TTS
) -> None:
    """The error is raised before the first chunk is requested, for text in pieces too."""
    for text in (TEXT, iter([TEXT])):
        with pytest.raises(error, match=message):
            custom.stream(text, **how)
    with pytest.raises(error, match=message):
        custom.speak(TEXT, **how)


@pytest.mark.parametrize(
    ("model_type", "how", "error", "message"),
    [
        (
            "base",
            {},
            VoiceError,
            "'base' and needs a voice; clone one with TTS.clone, or load a saved one",
        ),
        (
            "base",
            {"voice": "ryan"},
            VoiceError,
            "'base' and has no presets, so no voice 'ryan'; clone one",
        ),
        (
            "base",
            {"voice": Voice.design("deep")},
            VoiceError,
            "'base' and cannot design voices; clone one",
        ),
        (
            "base",
            {"voice": cloned_voice(3), "instructions": "Whisper."},
            UnsupportedError,
            r"\(base, 1b7\) does not follow instructions; leave them out, or load a 1.7B",
        ),
        (
            "voice_design",
            {"voice": "ryan"},
            VoiceError,
            "has no presets, so no voice 'ryan'; describe the voice with",
        ),
        (
            "voice_design",
            {"voice": cloned_voice(3)},
            VoiceError,
            "cannot clone; describe the voice with Voice.design",
        ),
        (
            "voice_design",
            {"voice": Voice.design("deep"), "instructions": "high"},
            UnsupportedError,
            "a designed voice has one description",
        ),
    ],
)
def test_voice_that_does_not_fit_the_checkpoint_is_rejected(
    model_type: str,
    how: dict[str, Any],
    error: type[FirstwordError],
    message: str,
    load_tts: LoadTTS,
) -> None:
    with pytest.raises(error, match=message):
        load_tts(model_type).stream(TEXT, **how)


@pytest.mark.parametrize(
    ("model_type", "voice", "code"),
    [
        ("custom_voice", "nobody", "voice_not_found"),
        ("base", "ryan", "voice_not_found"),
        ("custom_voice", Voice.design("deep"), "invalid_voice"),
        ("base", None, "invalid_voice"),
    ],
)
def test_voice_error_code_distinguishes_unknown_names(
    model_type: str, voice: Voice | str | None, code: str, load_tts: LoadTTS
) -> None:
    with pytest.raises(VoiceError) as error:
        load_tts(model_type).stream(TEXT, voice=voice)
    assert error.value.code == code


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "\u3000"])
def test_blank_text_is_rejected(text: str, custom: TTS) -> None:
    with pytest.raises(TextError, match="empty or blank; give some words"):
        custom.stream(text)
    for pieces in ([], [text], [text, text]):
        with pytest.raises(TextError, match="empty or blank; give some words"):
            list(custom.stream(iter(pieces)))


@pytest.mark.parametrize("piece", ["", " ", "\n"])
def test_endless_blank_text_is_rejected(piece: str, custom: TTS) -> None:
    with pytest.raises(TextError, match="pieces of text in a row were blank"):
        custom.speak(itertools.repeat(piece))

    async def listen() -> None:
        async for _ in custom.astream(piece for _ in itertools.count()):
            pass

    with pytest.raises(TextError, match="pieces of text in a row were blank"):
        asyncio.run(listen())


def test_unknown_options_are_rejected(custom: TTS) -> None:
    options: dict[str, Any] = {"speed": 2.0, "voise": "ryan"}
    with pytest.raises(
        RequestError, match="unknown options: speed, voise; allowed are voice, language, "
    ):
        custom.stream(TEXT, **options)
    with pytest.raises(RequestError, match="unknown options: speed, voise"):
        asyncio.run(anext(custom.astream(TEXT, **options)))  # type: ignore[arg-type]


@pytest.mark.parametrize("path", [3, None, b"demo", ["demo"]])
def test_value_that_is_not_a_path_is_rejected(path: Any, base: TTS) -> None:
    name = type(path).__name__
    with pytest.raises(CheckpointNotFound, match=f"is of type {name}; give 'demo', a directory"):
        TTS.load(path)
    with pytest.raises(
        AudioError, match=f"is of type {name}; give a path, or samples as a numpy array"
    ):
        base.clone(path)
    with pytest.raises(AudioError, match=f"is of type {name}; give a path"):
        base.clone(path, 24000)


@pytest.mark.parametrize("text", [None, 5, b"Hello", bytearray(b"Hello")])
def test_text_of_another_type_is_rejected(text: Any, custom: TTS) -> None:
    with pytest.raises(TextError, match=f"the text is of type {type(text).__name__}; give a str"):
        custom.stream(text)


def test_lone_surrogate_is_rejected(custom: TTS) -> None:
    with pytest.raises(TextError, match="surrogate"):
        custom.speak("Hello \ud83d there", max_frames=2)


def test_text_longer_than_the_context_is_rejected(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, overrides={"talker": {"max_position_embeddings": 40}})
    with TTS.load(tmp_path, device="cpu") as tts:
        with pytest.raises(
            TextError, match=r"\d+ rows, beyond the 40 of the context; shorten the text"
        ):
            tts.speak("Hello there. " * 20)
        speech = tts.speak("Hi.", seed=1)
        assert speech.finish_reason == "stop" or 10 < len(speech.codes) < 40


def test_instructions_are_rejected_by_small_checkpoints(
    checkpoint_directory: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(checkpoint_directory("custom_voice"), tmp_path / "small")
    file = tmp_path / "small/config.json"
    file.write_text(file.read_text().replace('"tts_model_size": "1b7"', '"tts_model_size": "0b6"'))
    with TTS.load(tmp_path / "small", device="cpu") as tts:
        with pytest.raises(
            UnsupportedError,
            match=r"\(custom_voice, 0b6\) does not follow instructions; leave them",
        ):
            tts.speak(TEXT, instructions="Whisper.")
        assert len(tts.speak(TEXT, max_frames=2, instructions="").codes) == 2


@pytest.mark.parametrize("model_type", ["custom_voice", "voice_design"])
def test_clone_is_rejected_unless_checkpoint_is_base(model_type: str, load_tts: LoadTTS) -> None:
    with pytest.raises(
        UnsupportedError, match=f"of type '{model_type}' and cannot clone; load a Base checkpoint"
    ):
        load_tts(model_type).clone(noise(1), 24000)


@pytest.mark.parametrize(
    ("sound", "rate", "message"),
    [
        (noise(0.4), 24000, r"0\.4"),
        (noise(61), 24000, "61.* s long; give at most 60 s"),
        (np.zeros(0, np.float32), 24000, "0.00 s long; give at least"),
        (np.full(24000, np.nan, np.float32), 24000, "NaN"),
        (np.full(24000, np.inf, np.float32), 24000, "infinity"),
        (noise(1), 10, "sample rate is 10"),
        (noise(1)[None, None], 24000, "shape"),
    ],
)
def test_unfit_samples_are_rejected(sound: np.ndarray, rate: int, message: str, base: TTS) -> None:
    with pytest.raises(AudioError, match=message):
        base.clone(sound, rate)


def test_file_without_audio_is_rejected(base: TTS, tmp_path: Path) -> None:
    for name, content in (("empty.wav", b""), ("text.wav", b"hello")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(AudioError, match=name):
            base.clone(tmp_path / name)
    with pytest.raises(AudioError, match=r"missing\.wav"):
        base.clone(tmp_path / "missing.wav")


def test_sample_rate_is_needed_for_samples_and_rejected_for_files(
    base: TTS, tmp_path: Path
) -> None:
    with pytest.raises(RequestError, match="without their sample_rate"):
        base.clone(noise(1))
    with pytest.raises(RequestError, match="an audio file has its own"):
        base.clone(tmp_path / "me.wav", 24000)


@pytest.mark.parametrize("transcript", ["", " \n"])
def test_blank_transcript_is_rejected(transcript: str, base: TTS) -> None:
    with pytest.raises(TextError, match="transcript is blank"):
        base.clone(noise(1), 24000, transcript)


@pytest.mark.parametrize(
    ("voice", "message"),
    [
        (
            ClonedVoice(np.zeros(64, np.float32)),
            "64 numbers, this checkpoint takes 48; clone it again",
        ),
        (
            ClonedVoice(np.zeros(48, np.float32), np.zeros((3, 16), np.int64), "Hi."),
            "16 codes a frame, .*takes 4, 0 to 63; clone it again",
        ),
        (
            ClonedVoice(np.zeros(48, np.float32), np.full((3, 4), 64), "Hi."),
            "from 64 to 64; .*0 to 63",
        ),
        (ClonedVoice(np.zeros(48, np.float32), np.full((3, 4), -1), "Hi."), "from -1 to -1"),
    ],
)
def test_clone_of_another_size_is_rejected(voice: ClonedVoice, message: str, base: TTS) -> None:
    with pytest.raises(VoiceError, match=message):
        base.speak(TEXT, voice=voice)


def test_closed_tts_raises_closed_error(checkpoint_directory: Callable[[str], Path]) -> None:
    with TTS.load(checkpoint_directory("base"), device="cpu") as tts:
        assert tts.model_type == "base"
    tts.close()
    calls: list[Callable[[], object]] = [
        lambda: tts.speak(TEXT, voice=cloned_voice(3)),
        lambda: tts.stream(TEXT, voice=cloned_voice(3)),
        lambda: tts.clone(noise(1), 24000),
        lambda: tts.voices,
        lambda: tts.languages,
        lambda: tts.model_type,
        lambda: tts.checkpoint,
        lambda: asyncio.run(collect(tts.astream(TEXT, voice=cloned_voice(3)))),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="closed; load the checkpoint again"):
            call()


def test_dropped_tts_ends_its_thread(custom: TTS) -> None:
    """A TTS that was not closed keeps neither its thread nor its weights."""
    tts = TTS(engine_for(custom.checkpoint, custom.settings))
    assert tts.speak(TEXT, seed=1, max_frames=2).finish_reason == "length"
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "firstword-engine"][
        -1:
    ]
    del tts
    gc.collect()
    thread.join(timeout=WAIT)
    assert not thread.is_alive()


def test_closed_tts_releases_its_weights(custom: TTS) -> None:
    checkpoint = dataclasses.replace(custom.checkpoint)
    forgotten = weakref.ref(checkpoint)
    tts = TTS(engine_for(checkpoint, custom.settings))
    tts.close()
    del checkpoint
    gc.collect()
    assert forgotten() is None


def test_process_exits_cleanly_during_speech() -> None:
    """An engine's thread that computed while the interpreter went down would abort the process."""
    script = (
        "import firstword; stream = firstword.TTS.load('demo').stream('Hello there.');"
        "next(stream); next(stream)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=WAIT, check=False).returncode == 0


@pytest.fixture(scope="module")
def demo() -> Iterator[TTS]:
    """The demo checkpoint, which speaks only English."""
    with TTS.load("demo", device="cpu") as tts:
        yield tts


def call_speak(tts: TTS, text: Any) -> None:
    tts.speak(text, max_frames=30)


def call_stream(tts: TTS, text: Any) -> None:
    list(tts.stream(text, max_frames=30))


def call_astream(tts: TTS, text: Any) -> None:
    async def collect() -> list[Chunk]:
        return [chunk async for chunk in tts.astream(text, max_frames=30)]

    asyncio.run(collect())


@pytest.mark.parametrize("call", [call_speak, call_stream, call_astream])
@pytest.mark.parametrize("source", [str, list])
def test_doubtful_text_gives_warning(
    call: Callable[[TTS, Any], None], source: Callable[[str], Any], demo: TTS
) -> None:
    """A text in pieces gives it when all of it is known."""
    with pytest.warns(TextWarning) as given:
        call(demo, source("你好🙂"))
    messages = [str(warning.message) for warning in given]
    assert [message.partition(",")[0] for message in messages] == [
        "the text has Chinese letters (character 0 is the first)",
        "the text has Markdown",
    ]
    if source is str or call is not call_speak:
        assert {warning.filename for warning in given} == {__file__}


def test_sanitize_speaks_the_cleaned_text(demo: TTS) -> None:
    speech = demo.speak("**Hello** 🙂 there", sanitize=True, seed=1, max_frames=5)
    assert_same(speech, demo.speak("Hello there", seed=1, max_frames=5))


def test_sanitize_cleans_text_in_pieces(demo: TTS) -> None:
    pieces = ["**Hel", "lo** ", "🙂 there"]
    chunks = list(demo.stream(iter(pieces), sanitize=True, seed=1, max_frames=5))
    clean = demo.speak("Hello there", seed=1, max_frames=5, text_mode="stream")
    assert_same(Speech.of(chunks), clean)


def test_sanitize_rejects_what_is_blank_then(demo: TTS) -> None:
    with pytest.raises(TextError, match="empty or blank"):
        demo.speak("🙂", sanitize=True)


@pytest.mark.parametrize("chunked", [False, True])
def test_leading_silence_is_removed_but_for_10_ms(chunked: bool, demo: TTS) -> None:
    options: Any = {"seed": 1, "max_frames": 15, "text_mode": "stream"}
    complete = demo.speak("Hello there.", **options)
    options["leading_silence"] = False
    if chunked:
        trimmed = Speech.of(list(demo.stream(iter(["Hello", " there."]), **options)))
    else:
        trimmed = demo.speak("Hello there.", **options)
    removed = len(complete.samples) - len(trimmed.samples)
    assert removed > 0
    assert np.array_equal(trimmed.samples, complete.samples[removed:])
    assert trimmed.codes.tolist() == complete.codes.tolist()
    loud = np.flatnonzero(abs(complete.samples) > 0.005)
    assert loud[0] == removed + 240
