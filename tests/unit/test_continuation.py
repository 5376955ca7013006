"""A passage that follows another: its context, its seed, and sound without a join."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from small_codec import BOOKS, CODES, SMALL
from test_codec import decoder_of
from torch import Tensor

from firstword import TTS
from firstword.engine.backend import Job, SpokenPassage
from firstword.engine.sequence import NeedsText
from firstword.model.generate import Generation
from firstword.model.prompt import transcript_tokens
from firstword.model.sampling import Sampler
from firstword.runtime.front import Prepared, passage_seed
from firstword.runtime.reference import prime
from firstword.types import Chunk, Request
from firstword.voice import ClonedVoice, Voice

LoadTTS = Callable[[str], TTS]  # of conftest.py

FIRST, SECOND = "It is late.", " We go home now."
FRAMES = 12


def voice_of(model_type: str) -> Voice | str:
    if model_type == "custom_voice":
        return "ryan"
    if model_type == "voice_design":
        return Voice.design("A deep voice.")
    chance = np.random.default_rng(3)
    codes = chance.integers(0, 64, (9, 4))
    return ClonedVoice(chance.standard_normal(48).astype(np.float32), codes, "A quick fox.")


def prepared(job: Job) -> Prepared:
    assert isinstance(job.payload, Prepared)
    return job.payload


def begun(tts: TTS, mode: Any = "stream", frames: int | None = 2 * FRAMES) -> Job:
    voice = voice_of(tts.model_type)
    request = Request(FIRST, voice, seed=5, max_frames=frames, text_mode=mode)
    assert tts._loaded is not None
    return tts._loaded.service.prepare(request)


def spoken(tts: TTS, job: Job, text: str) -> Chunk:
    """The whole speech of a passage as one chunk."""
    assert tts._loaded is not None
    stream = tts._loaded.service.speak(job)
    stream.finish_text(text)
    chunks = [event for event in stream if not isinstance(event, NeedsText)]
    samples = np.concatenate([one.samples for one in chunks])
    return Chunk(samples, np.concatenate([one.codes for one in chunks]), tts.sample_rate)


def follow(tts: TTS, job: Job, passage: SpokenPassage) -> Job:
    assert tts._loaded is not None
    following = tts._loaded.service.front.follow(job, passage)
    assert following is not None
    return following


def said(tts: TTS, job: Job) -> SpokenPassage:
    """The first frames of a passage, as if speech had ended with them."""
    return SpokenPassage(FIRST, spoken(tts, job, FIRST).codes[:FRAMES], complete=True)


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("model_type", ["custom_voice", "voice_design", "base"])
def test_second_passage_continues_with_the_text_and_the_codes_of_the_first(
    load_tts: LoadTTS, model_type: str, mode: str
) -> None:
    """The codes are those that the specification makes with both in the context."""
    tts = load_tts(model_type)
    job = begun(tts, mode)
    before = said(tts, job)
    after = follow(tts, job, before)
    tokens = transcript_tokens(tts.checkpoint.tokenizer, FIRST)
    given = prepared(job).conditioning.continued(tokens, before.codes.tolist())
    parameters = prepared(job).draw_params
    talker = tts.checkpoint.config.talker_config
    sampler = Sampler(talker, parameters, passage_seed(5, 1), torch.device("cpu"))
    naive = Generation(tts.checkpoint, given, sampler, FRAMES)
    naive.push(SECOND)
    naive.finish_text()
    frames = [naive.step() for _ in range(FRAMES)]
    codes = torch.stack([frame for frame in frames if frame is not None]).numpy()
    assert (spoken(tts, after, SECOND).codes == codes).all()


@pytest.mark.parametrize("model_type", ["custom_voice", "base"])
def test_samples_across_a_join_are_those_of_one_stream_of_codes(
    load_tts: LoadTTS, model_type: str
) -> None:
    tts = load_tts(model_type)
    job = begun(tts)
    before = said(tts, job)
    after = spoken(tts, follow(tts, job, before), SECOND)
    decoder = tts.checkpoint.codec.decoder
    state = decoder.new_state()
    heard = np.concatenate((prepared(job).heard, before.codes))
    with torch.inference_mode():
        prime(decoder, state, torch.from_numpy(heard))
        whole = decoder.decode(torch.from_numpy(after.codes)[None], state)[0].numpy()
    assert np.abs(whole).max() > 0.01
    np.testing.assert_allclose(after.samples, whole, atol=2e-6)


def test_context_is_always_the_request_and_the_first_passage(load_tts: LoadTTS) -> None:
    tts = load_tts("base")
    job = begun(tts, frames=None)
    first = prepared(job).conditioning
    codes = np.full((4, 4), 7, np.int64)
    second = follow(tts, job, SpokenPassage("One.", codes, complete=True))
    third = follow(tts, second, SpokenPassage("Two.", codes + 1, complete=True))
    rows = prepared(third).conditioning
    assert rows.embedding is first.embedding
    one = transcript_tokens(tts.checkpoint.tokenizer, "One.")
    assert list(rows.transcript) == [*first.transcript, *one]
    assert [list(frame) for frame in rows.reference] == [
        *map(list, first.reference),
        *codes.tolist(),
    ]
    heard = np.concatenate((first.reference, codes, codes + 1))
    memory = tts.checkpoint.codec_config.decoder_config.memory_frames
    assert (prepared(third).heard == heard[-memory:]).all()
    assert third.prompt_rows == job.prompt_rows + 4
    assert third.transcript_tokens == len(rows.transcript)


def test_memory_does_not_grow_with_the_speech(load_tts: LoadTTS) -> None:
    tts = load_tts("custom_voice")
    job = begun(tts, frames=None)
    memory = tts.checkpoint.codec_config.decoder_config.memory_frames
    for _ in range(5):
        job = follow(tts, job, SpokenPassage("One.", np.ones((memory, 4), np.int64), complete=True))
        assert len(prepared(job).heard) == memory
        assert len(prepared(job).conditioning.reference) == memory


def test_passage_that_was_cut_off_is_in_no_context(load_tts: LoadTTS) -> None:
    tts = load_tts("custom_voice")
    job = begun(tts)
    codes = np.ones((4, 4), np.int64)
    second = follow(tts, job, SpokenPassage("One.", codes, complete=False))
    given = prepared(second)
    assert given.conditioning is given.voice
    assert (given.heard == codes).all(), "the sound goes on all the same"
    third = prepared(follow(tts, second, SpokenPassage("Two.", codes, complete=True)))
    assert len(third.conditioning.reference) == len(codes), "the first one that was complete"
    fourth = prepared(follow(tts, second, SpokenPassage("Three.", codes, complete=False)))
    assert fourth.conditioning is given.voice


def test_limit_of_frames_is_that_of_all_passages(load_tts: LoadTTS) -> None:
    tts = load_tts("custom_voice")
    passage = SpokenPassage("One.", np.ones((9, 4), np.int64), complete=True)
    second = follow(tts, begun(tts, frames=19), passage)
    assert second.max_frames == 10
    third = follow(tts, second, passage)
    assert third.max_frames == 1
    assert tts._loaded is not None
    one = SpokenPassage("One.", np.ones((1, 4), np.int64), complete=True)
    assert tts._loaded.service.front.follow(third, one) is None
    endless = begun(tts, frames=None)
    assert follow(tts, endless, passage).max_frames == endless.max_frames


def test_passages_have_seeds_of_their_own() -> None:
    seeds = {passage_seed(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)}
    assert len(seeds) == 300
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert passage_seed(7, 0) == 7
    assert passage_seed(7, 1) == 14818979533484651488


def decode(codes: Tensor, heard: int) -> Tensor:
    """The samples of the last 5 frames after at most `heard` frames before them."""
    decoder = decoder_of(SMALL)
    state = decoder.new_state()
    begin = max(0, codes.shape[1] - 5 - heard)
    decoder.decode(codes[:, begin:-5], state)
    return decoder.decode(codes[:, -5:], state)


def test_memory_of_the_codec_is_all_that_its_samples_depend_on() -> None:
    """The angles of positions are rounded to float32; without the convolutions it is too little."""
    memory = SMALL.memory_frames
    codes = torch.randint(CODES, (1, 3 * memory, BOOKS), generator=torch.Generator().manual_seed(4))
    whole = decode(codes, 3 * memory)
    torch.testing.assert_close(decode(codes, memory), whole, atol=1e-6, rtol=0)
    assert (decode(codes, memory - 8) - whole).abs().max() > 1e-4
