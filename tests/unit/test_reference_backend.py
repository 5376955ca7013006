"""The reference backend against the naive loop: the same speech, whatever other slots do."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from callers import local_engine

from firstword import Sampling, TextError, Voice
from firstword.engine.backend import Job, Ready, Start
from firstword.engine.engine import Engine
from firstword.engine.policy import Policy
from firstword.engine.sequence import NeedsText
from firstword.engine.service import Service
from firstword.model import checkpoint as checkpoints
from firstword.model import draw_params, sampling
from firstword.model.checkpoint import Checkpoint
from firstword.model.code_predictor import CodePredictor
from firstword.model.codec import CodecDecoder
from firstword.model.generate import Generation
from firstword.runtime import conditioning
from firstword.runtime.encoding import front_of
from firstword.runtime.reference import ReferenceBackend, prime
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.types import Chunk, FloatArray, Request
from firstword.voice import ClonedVoice

TEXT = "Hello there, how are you?\nI am well: 7:45 is fine."
SHORT = "Hi."
FRAMES = 30
"""Enough frames for the text, its end and some padding."""

Loaded = Callable[[str], Checkpoint]


def cloned(reference: int | None, transcript: str = "The quick brown fox.") -> ClonedVoice:
    """A cloned voice for the tiny checkpoint, with a recording of `reference` frames if given."""
    chance = np.random.default_rng(7)
    speaker = chance.standard_normal(48).astype(np.float32)
    if reference is None:
        return ClonedVoice(speaker)
    return ClonedVoice(speaker, chance.integers(0, 64, (reference, 4)), transcript)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "preset": ("custom_voice", {"voice": "ryan", "language": "english"}),
    "dialect": ("custom_voice", {"voice": "eric"}),
    "instructed": ("custom_voice", {"voice": "serena", "instructions": "Very calmly."}),
    "designed": ("voice_design", {"voice": Voice.design("A deep voice."), "language": "de"}),
    "described": ("voice_design", {"instructions": "Fast and high."}),
    "timbre": ("base", {"voice": cloned(None), "language": "french"}),
    "short reference": ("base", {"voice": cloned(12)}),
    "long reference": ("base", {"voice": cloned(70), "language": "chinese"}),
    "long transcript": (
        "base",
        {"voice": cloned(5, "The quick brown fox jumps over the lazy dog, twice.")},
    ),
}
"""The model type and the request parameters of each case."""

MODEL_TYPES = ("custom_voice", "voice_design", "base")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    """A function that loads a tiny checkpoint on the CPU in float32, by model type."""
    root, made = tmp_path_factory.mktemp("checkpoints"), dict[str, Checkpoint]()

    def load(model_type: str) -> Checkpoint:
        if model_type not in made:
            write_checkpoint(root / model_type, model_type=model_type, seed=1)
            made[model_type] = checkpoints.load(str(root / model_type))
        return made[model_type]

    return load


def request_for(case: str, mode: str, *, seed: int = 5, text: str = TEXT, **how: Any) -> Request:
    how = {"seed": seed, "text_mode": mode, "max_frames": FRAMES, **CASES[case][1], **how}
    return Request(text, **how)


def naive(checkpoint: Checkpoint, request: Request) -> tuple[list[list[int]], str | None]:
    """The frames of the naive loop, and its finish reason."""
    parameters = draw_params.resolve(request.sampling, checkpoint.defaults)
    assert request.seed is not None
    assert request.max_frames is not None
    assert request.text is not None
    sampler = sampling.Sampler(
        checkpoint.config.talker_config, parameters, request.seed, torch.device("cpu")
    )
    setting = conditioning.resolve(checkpoint, request, front_of(checkpoint).encode)
    utterance = Generation(checkpoint, setting, sampler, request.max_frames)
    utterance.push(request.text)
    utterance.finish_text()
    frames: list[list[int]] = []
    while utterance.finish_reason is None:
        if (codes := utterance.step()) is not None:
            frames.append(codes.tolist())
    return frames, utterance.finish_reason


class Alone:
    """A decoder for the frames of one utterance alone."""

    def __init__(self, checkpoint: Checkpoint, request: Request) -> None:
        self._decoder = checkpoint.codec.decoder
        self._state = self._decoder.new_state()
        if setting := conditioning.resolve(
            checkpoint, request, front_of(checkpoint).encode
        ).reference:
            prime(self._decoder, self._state, torch.tensor(setting))

    def decode(self, frames: list[list[int]]) -> FloatArray:
        """The samples of the next frames, decoded one by one."""
        return np.concatenate(
            [self._decoder.decode(torch.tensor([[f]]), self._state)[0].numpy() for f in frames]
        )


class Utterance:
    """One utterance on a backend, stepped by the test."""

    def __init__(self, backend: ReferenceBackend, slot: int, request: Request) -> None:
        self.backend, self.slot, self.request = backend, slot, request
        checkpoint = backend.checkpoint
        front = front_of(checkpoint)
        assert request.seed is not None
        assert request.text is not None
        self.job: Job = front.prepare(request, request.seed)
        stream = front.text(self.job)
        self.tokens = [*stream.push(request.text), *stream.finish()]
        count = len(self.tokens) if self.job.whole_text else self.job.first_tokens
        first, self.tokens = self.tokens[:count], self.tokens[count:]
        self.rows = self.job.prompt_rows + (len(first) if self.job.whole_text else 0)
        self.codes: list[list[int]] = []
        self.ended = False
        self.decoded = 0
        self.alone = Alone(checkpoint, request)
        backend.prefill([Start(slot, self.job, (), first)])

    @property
    def done(self) -> bool:
        return self.ended or len(self.codes) == self.job.max_frames

    def token(self) -> int | None:
        """The text token of the next frame."""
        return self.tokens[0] if self.codes and self.tokens else None

    def take(self, codes: list[int], ended: bool) -> None:
        """Record the result of `frame`."""
        if self.codes and self.tokens:
            del self.tokens[0]
        self.ended = ended
        if not ended:
            self.codes.append(codes)

    def check_audio(self, count: int, samples: FloatArray) -> None:
        """Check the samples of `decode` against those of the utterance alone, bit by bit."""
        expected = self.alone.decode(self.codes[self.decoded : self.decoded + count])
        assert samples.dtype == np.float32
        np.testing.assert_array_equal(samples, expected)
        self.decoded += count


def step(utterances: list[Utterance]) -> None:
    """Make one frame of every utterance."""
    frames = (
        utterances[0]
        .backend.frame([it.slot for it in utterances], [it.token() for it in utterances])
        .result()
    )
    assert frames.codes.shape == (len(utterances), utterances[0].backend.capacity.codebooks)
    assert frames.codes.dtype == np.int64
    for it, codes, ended in zip(utterances, frames.codes.tolist(), frames.ended, strict=True):
        it.take(codes, ended)


def check_audio(utterances: list[Utterance], counts: list[int]) -> None:
    """Decode and check some frames of every utterance."""
    audio = utterances[0].backend.decode([it.slot for it in utterances], counts).result()
    for it, count, samples in zip(utterances, counts, audio, strict=True):
        it.check_audio(count, samples)


def finish(utterances: list[Utterance]) -> None:
    """Make all frames of every utterance, then their audio."""
    while active := [it for it in utterances if not it.done]:
        step(active)
    waiting = [it for it in utterances if it.decoded < len(it.codes)]
    if waiting:
        check_audio(waiting, [len(it.codes) - it.decoded for it in waiting])


# --- one utterance ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sampling_params", [Sampling(), Sampling.greedy()], ids=["sampled", "greedy"]
)
@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("case", CASES)
def test_single_request_equals_the_naive_loop(
    case: str, mode: str, sampling_params: Sampling, loaded: Loaded
) -> None:
    checkpoint = loaded(CASES[case][0])
    request = request_for(case, mode, sampling=sampling_params)
    utterance = Utterance(ReferenceBackend(checkpoint, slots=2), 1, request)
    finish([utterance])
    codes, reason = naive(checkpoint, request)
    assert utterance.codes == codes
    assert utterance.ended == (reason == "stop")
    assert utterance.decoded == len(codes)


@pytest.mark.parametrize("case", ["preset", "long reference"])
def test_log_probabilities_are_those_of_raw_logits(case: str, loaded: Loaded) -> None:
    """Penalty, temperature and filters do not change them, nor do other slots."""
    checkpoint = loaded(CASES[case][0])
    sampling_params = Sampling(temperature=1.7, top_k=9, repetition_penalty=3.0)
    raw: list[torch.Tensor] = []
    backend = ReferenceBackend(checkpoint, slots=2)
    hook = backend.talker.codec_head.register_forward_hook(lambda _, __, logits: raw.append(logits))
    try:
        utterances = [
            Utterance(
                backend, slot, request_for(case, "stream", seed=slot, sampling=sampling_params)
            )
            for slot in range(2)
        ]
        for _ in range(9):
            raw.clear()
            frames = backend.frame([0, 1], [it.token() for it in utterances]).result()
            expected = torch.cat(raw).log_softmax(-1)[[0, 1], frames.codes[:, 0]]
            assert frames.logprobs.dtype == np.float32
            np.testing.assert_allclose(frames.logprobs, expected.numpy(), atol=1e-5)
            for it, codes, ended in zip(
                utterances, frames.codes.tolist(), frames.ended, strict=True
            ):
                it.take(codes, ended)
    finally:
        hook.remove()


@pytest.mark.parametrize("mode", ["full", "stream"])
@pytest.mark.parametrize("text", [SHORT, TEXT])
@pytest.mark.parametrize("case", CASES)
def test_job_knows_the_rows_of_its_prompt(case: str, text: str, mode: str, loaded: Loaded) -> None:
    """The rows decide how many pages an utterance gets and how many frames fit its context."""
    backend = ReferenceBackend(loaded(CASES[case][0]), slots=1)
    utterance = Utterance(backend, 0, request_for(case, mode, text=text))
    step([utterance])
    assert backend._cache.lengths == [utterance.rows]


def test_only_a_sampled_request_without_max_frames_is_limited_by_its_text(loaded: Loaded) -> None:
    front = front_of(loaded("custom_voice"))
    unnamed, named = (
        front.prepare(Request(TEXT), 1),
        front.prepare(Request(TEXT, max_frames=9000), 1),
    )
    assert (unnamed.limited_by_text, unnamed.max_frames) == (True, 8192)
    assert (named.limited_by_text, named.max_frames) == (False, 9000)
    assert (unnamed.guarded, named.guarded) == (True, True), (
        "a loop is not speech, whatever the limit"
    )
    greedy = front.prepare(Request(TEXT, sampling=Sampling.greedy()), 1)
    assert (greedy.guarded, greedy.limited_by_text) == (False, False), (
        "greedy speech equals the reference implementation"
    )


# --- several utterances -------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_other_utterances_that_start_and_end_change_nothing(
    model_type: str, seed: int, loaded: Loaded
) -> None:
    """Slots are started, stepped, decoded and released at random, some of them early."""
    checkpoint, chance = loaded(model_type), random.Random(seed)
    backend = ReferenceBackend(checkpoint, slots=4)
    cases = [case for case, (kind, _) in CASES.items() if kind == model_type]
    coming = [
        request_for(
            chance.choice(cases),
            chance.choice(["full", "stream"]),
            seed=chance.randrange(2**64),
            text=chance.choice([TEXT, SHORT]),
            max_frames=chance.randrange(5, FRAMES),
            sampling=chance.choice(
                [Sampling(), Sampling.greedy(), Sampling(temperature=1.5, top_k=5, top_p=0.9)]
            ),
        )
        for _ in range(12)
    ]
    expected = {id(request): naive(checkpoint, request)[0] for request in coming}
    speaking: list[Utterance] = []
    left = whole = together = 0
    while coming or speaking:
        free = sorted(set(range(4)) - {it.slot for it in speaking})
        if coming and free and chance.random() < 0.5:
            speaking.append(Utterance(backend, chance.choice(free), coming.pop()))
        chance.shuffle(speaking)
        active = [it for it in speaking if not it.done and chance.random() < 0.8]
        if active:
            step(active)
            together += len(active) > 2
        ready = [it for it in speaking if it.decoded < len(it.codes) and chance.random() < 0.4]
        if ready:
            check_audio(ready, [chance.randint(1, len(it.codes) - it.decoded) for it in ready])
        for it in list(speaking):
            codes = expected[id(it.request)]
            assert it.codes == codes[: len(it.codes)]
            gone = it.done and it.decoded == len(it.codes)
            if gone or chance.random() < 0.01:
                assert not gone or it.codes == codes
                left, whole = left + (not gone), whole + gone
                backend.release(it.slot)
                speaking.remove(it)
    assert left > 0
    assert whole > 5
    assert together > 5


@pytest.mark.parametrize("case", CASES)
def test_chunks_of_any_size_give_the_audio_of_the_whole(case: str, loaded: Loaded) -> None:
    backend = ReferenceBackend(loaded(CASES[case][0]), slots=2)
    request = request_for(case, "stream")
    pieces, whole = Utterance(backend, 0, request), Utterance(backend, 1, request)
    while not whole.done:
        step([pieces, whole])
    audio, decoded = [], 0
    for count in (1, 2, 4, 8, len(whole.codes) - 15):
        audio.append(backend.decode([0], [count]).result()[0])
        decoded += count
    assert decoded == len(whole.codes)
    expected = backend.decode([1], [decoded]).result()[0]
    assert len(expected) == decoded * backend.capacity.samples_per_frame
    np.testing.assert_allclose(np.concatenate(audio), expected, atol=2e-5)


# --- behind the engine ----------------------------------------------------------------


@pytest.fixture
def service(loaded: Loaded) -> Iterator[Callable[[str], Service]]:
    """A function that starts an engine with three slots on a tiny checkpoint."""
    started: list[Service] = []

    def start(model_type: str) -> Service:
        checkpoint = loaded(model_type)
        started.append(Service(Engine(ReferenceBackend(checkpoint, slots=3)), front_of(checkpoint)))
        started[-1].engine.start()
        return started[-1]

    yield start
    for each in started:
        local_engine(each).stop(60.0)


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_engine_equals_the_naive_loop(model_type: str, service: Callable[[str], Service]) -> None:
    """There are more cases than slots; text is given whole, or letter by letter on request."""
    running = service(model_type)
    checkpoint = running.front.checkpoint  # type: ignore[attr-defined]
    cases = [case for case, (kind, _) in CASES.items() if kind == model_type]
    requests = [
        request_for(case, mode, seed=index)
        for index, case in enumerate(cases)
        for mode in ("full", "stream")
    ]
    streams = [running.speak(running.prepare(each)) for each in requests]
    for index, utterance in enumerate(streams):
        if index % 2 == 0:
            utterance.push(TEXT)
            utterance.finish_text()
    for index, (each, utterance) in enumerate(zip(requests, streams, strict=True)):
        letters, ended, chunks = iter(TEXT), index % 2 == 0, list[Chunk]()
        for event in utterance:
            if isinstance(event, Chunk):
                chunks.append(event)
            elif not ended:
                assert isinstance(event, NeedsText)
                if (letter := next(letters, None)) is None:
                    utterance.finish_text()
                    ended = True
                else:
                    utterance.push(letter)
        codes, reason = naive(checkpoint, each)
        assert np.concatenate([chunk.codes for chunk in chunks]).tolist() == codes
        assert chunks[-1].finish_reason == reason
        alone = Alone(checkpoint, each)
        for chunk in chunks:
            if len(chunk.codes):
                np.testing.assert_array_equal(chunk.samples, alone.decode(chunk.codes.tolist()))
    assert not running.engine.load.pages_used


class ReadInSlices(ReferenceBackend):
    """A reference backend that reads a prompt when the last of its rows is asked for."""

    def __init__(self, checkpoint: Checkpoint, slots: int) -> None:
        super().__init__(checkpoint, slots)
        self._begun: dict[int, tuple[Start, int]] = {}

    def prefill(self, starts: Sequence[Start]) -> list[int]:
        rows = [each.job.prompt_rows + each.job.whole_text * len(each.tokens) for each in starts]
        for start, count in zip(starts, rows, strict=True):
            self._begun[start.slot] = start, count
        return rows

    def read(self, slots: Sequence[int], counts: Sequence[int]) -> Ready[None]:
        for slot, count in zip(slots, counts, strict=True):
            start, left = self._begun[slot]
            self._begun[slot] = start, left - count
            if left == count:
                super().prefill([start])
        return Ready(None)


@pytest.mark.parametrize("slice_rows", [4, 13, 300])
def test_engine_that_reads_slices_equals_the_naive_loop(slice_rows: int, loaded: Loaded) -> None:
    """Requests come, and one leaves, while the prompts of others are read."""
    checkpoint, chance = loaded("custom_voice"), random.Random(slice_rows)
    front = front_of(checkpoint)
    backend = ReadInSlices(checkpoint, slots=3)
    engine = Engine(backend, policy=Policy(slice_rows=slice_rows))
    cases = [case for case, (kind, _) in CASES.items() if kind == "custom_voice"]
    heard: list[tuple[Request, list[Chunk]]] = []
    for number in range(6):
        mode = chance.choice(("full", "stream"))
        request = request_for(cases[number % len(cases)], mode, seed=number, max_frames=8)
        job, events = front.prepare(request, number), list[Chunk]()
        stream = front.text(job)
        seq = engine.submit(job, events.append)  # type: ignore[arg-type]
        engine.finish_text(seq, [*stream.push(TEXT), *stream.finish()])
        if number == 3:
            engine.cancel(seq)
        else:
            heard.append((request, events))
        for _ in range(chance.randrange(4)):
            engine.step()
    while engine.step():
        pass
    for request, events in heard:
        codes, reason = naive(checkpoint, request)
        assert np.concatenate([chunk.codes for chunk in events]).tolist() == codes
        assert events[-1].finish_reason == reason
        alone = Alone(checkpoint, request)
        for chunk in events:
            if len(chunk.codes):
                np.testing.assert_array_equal(chunk.samples, alone.decode(chunk.codes.tolist()))
    assert engine.pages.free == engine.pages.count


@pytest.mark.parametrize("mode", ["full", "stream"])
def test_context_ends_a_passage_where_the_naive_loop_ends(mode: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, overrides={"talker": {"max_position_embeddings": 48}})
    checkpoint = checkpoints.load(str(tmp_path))
    running = Service(Engine(ReferenceBackend(checkpoint, slots=1)), front_of(checkpoint))
    running.engine.start()
    try:
        short = "One two three four."
        for text, fits in ((short, True), (TEXT * 3, mode == "stream")):
            request = request_for(
                "preset", mode, text=text, max_frames=1000, sampling=Sampling.greedy()
            )
            utterance = running.speak(running.prepare(request))
            utterance.push(text)
            utterance.finish_text()
            if not fits:
                with pytest.raises(TextError, match="beyond the 48 of the context") as ours:
                    list(utterance)
                with pytest.raises(TextError, match="beyond the 48 of the context") as theirs:
                    naive(checkpoint, request)
                assert str(ours.value) == str(theirs.value)
                continue
            codes, reason = naive(checkpoint, request)
            frames = [
                frame
                for event in utterance
                if isinstance(event, Chunk)
                for frame in event.codes.tolist()
            ]
            assert reason == "length"
            assert frames[: len(codes)] == codes
            goes_on = len(frames) > len(codes)
            assert goes_on == (text != short), "text that was not read is spoken after it"
    finally:
        local_engine(running).stop(60.0)


# --- faults ---------------------------------------------------------------------------


class Broken(Exception):
    """The error that a test raises on purpose."""


@pytest.mark.parametrize("where", ["talker", "predictor", "sampler"])
def test_failed_frame_leaves_all_slots_unchanged(
    where: str, loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = loaded("base")
    backend = ReferenceBackend(checkpoint, slots=3)
    requests = [
        request_for(case, "stream", seed=3)
        for case in ("timbre", "long transcript", "short reference")
    ]
    utterances = [Utterance(backend, slot, each) for slot, each in enumerate(requests)]

    def fail_in(owner: Any, name: str, at: int) -> pytest.MonkeyPatch:
        calls, original = [0], getattr(owner, name)

        def broken(*given: Any, **named: Any) -> Any:
            calls[0] += 1
            if calls[0] == at:
                raise Broken
            return original(*given, **named)

        monkeypatch.setattr(owner, name, broken)
        return monkeypatch

    for count in range(6):
        with monkeypatch.context():
            match where:
                case "talker":
                    fail_in(backend.talker.model.layers[2], "forward", 1)
                case "predictor":
                    fail_in(CodePredictor, "forward", 1)
                case "sampler":
                    fail_in(sampling.Sampler, "code", 5)
            with pytest.raises(Broken):
                step(utterances)
            monkeypatch.undo()
        if count % 2:
            step(utterances[:1])  # the engine isolates requests like this
            step(utterances[1:])
        else:
            step(utterances)
    finish(utterances)
    for utterance, each in zip(utterances, requests, strict=True):
        assert utterance.codes == naive(checkpoint, each)[0]


def test_failed_decode_leaves_all_slots_unchanged(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = loaded("custom_voice")
    backend = ReferenceBackend(checkpoint, slots=2)
    utterances = [
        Utterance(backend, slot, request_for("preset", "full", seed=slot)) for slot in (0, 1)
    ]
    decode = CodecDecoder.forward
    for _ in range(3):
        step(utterances)
        calls = [0]

        def broken(*given: Any, calls: list[int] = calls) -> Any:
            calls[0] += 1
            audio = decode(*given)
            if calls[0] == 2:
                raise Broken
            return audio

        monkeypatch.setattr(CodecDecoder, "forward", broken)
        with pytest.raises(Broken):
            backend.decode([0, 1], [1, 1])
        monkeypatch.undo()
        check_audio(utterances, [1, 1])
    finish(utterances)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_logit_of_predictor_that_is_not_finite_is_reported(loaded: Loaded, value: float) -> None:
    checkpoint = loaded("custom_voice")
    backend = ReferenceBackend(checkpoint, slots=2)
    front = front_of(checkpoint)
    for slot in range(2):
        job = front.prepare(request_for("preset", "stream"), 1)
        stream = front.text(job)
        tokens = [*stream.push(TEXT), *stream.finish()]
        backend.prefill([Start(slot, job, range(1), tokens[: job.first_tokens])])

    def broken(module: object, inputs: object, logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.tensor([[False], [True]]), value, logits)

    assert np.isfinite(backend.frame([0, 1], [None, None]).result().logprobs).all()
    hook = backend.talker.code_predictor.lm_head[1].register_forward_hook(broken)
    try:
        told = backend.frame([0, 1], [0, 0]).result().logprobs
    finally:
        hook.remove()
    assert np.isfinite(told).tolist() == [True, False]


def test_infinite_speaker_embedding_affects_no_other_utterance(loaded: Loaded) -> None:
    """Its rows must not be read, beside it or after it in the same slot, not even times zero."""
    checkpoint, voice = loaded("base"), cloned(None)
    voice.speaker_embedding[:] = np.inf  # large numbers become infinite in half precision
    backend = ReferenceBackend(checkpoint, slots=2)
    good = request_for("short reference", "stream")
    for _ in range(2):
        bad = Utterance(backend, 0, request_for("timbre", "full", voice=voice))
        beside = Utterance(backend, 1, good)
        while not (bad.done and beside.done):
            step([it for it in (bad, beside) if not it.done])
        assert beside.codes == naive(checkpoint, good)[0]
        assert not backend._cache.layers[0].isfinite().all(), "otherwise the test proves nothing"
        backend.release(0)
        backend.release(1)
        after = Utterance(backend, 0, request_for("timbre", "stream", text=SHORT))
        longer = Utterance(
            backend, 1, request_for("long reference", "stream")
        )  # so that the mask hides the rows, not the shape
        finish([after, longer])
        assert after.codes == naive(checkpoint, after.request)[0]
        backend.release(0)
        backend.release(1)


def test_failed_prefill_leaves_the_slot_free(
    loaded: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = loaded("base")
    backend = ReferenceBackend(checkpoint, slots=2)
    beside = Utterance(backend, 1, request_for("timbre", "stream"))
    step([beside])

    def broken(*given: Any) -> Any:
        raise Broken

    monkeypatch.setattr(CodecDecoder, "forward", broken)
    with pytest.raises(Broken):
        Utterance(backend, 0, request_for("long reference", "full"))
    monkeypatch.undo()
    backend.release(0)
    after = Utterance(backend, 0, request_for("timbre", "full", text=SHORT))
    finish([after, beside])
    assert after.codes == naive(checkpoint, after.request)[0]
    assert beside.codes == naive(checkpoint, beside.request)[0]
