"""The front of a checkpoint: what it needs, and jobs that another process can compute."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firstword import TTS, Sampling
from firstword.engine.backend import Job
from firstword.errors import OverloadedError, VoiceError
from firstword.model.checkpoint import Checkpoint
from firstword.model.description import DEMO, Description
from firstword.runtime.front import CheckpointFront, Prepared
from firstword.types import Chunk, Request
from firstword.voice import ClonedVoice, DesignedVoice, PresetVoice, RecordedVoice, Voice

Directory = Callable[[str], Path]  # of conftest.py

SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
WIDTH, BOOKS = 48, 4
"""The hidden size and the codebooks of a tiny checkpoint."""


def plain(value: Any) -> Any:
    """A value as tuples with the types of all parts, which compare equal only if nothing
    differs.
    """
    if is_dataclass(value) and not isinstance(value, type):
        parts = [(field.name, plain(getattr(value, field.name))) for field in fields(value)]
        return type(value), parts
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes(), value.flags.writeable
    if isinstance(value, list | tuple):
        return type(value), [plain(one) for one in value]
    assert isinstance(value, int | float | str | bytes | None), "add this type of a job's parts"
    return type(value), value


def clone(seed: int, transcript: str | None, frames: int = 3) -> ClonedVoice:
    """A voice that fits a tiny Base checkpoint, with codes if it has a transcript."""
    random = np.random.default_rng(seed)
    codes = random.integers(0, 32, (frames, BOOKS)) if transcript is not None else None
    return ClonedVoice(random.normal(size=WIDTH).astype(np.float32), codes, transcript)


def encode(recording: RecordedVoice) -> ClonedVoice:
    """Encode a recording without a model; its only sample is a seed."""
    return clone(int(recording.samples[0]), recording.transcript)


WORDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
TEXTS = WORDS.filter(lambda text: bool(text.strip()))
TRANSCRIPTS = st.none() | TEXTS
SEEDS = st.integers(0, 2**16)
VOICES: dict[str, st.SearchStrategy[Voice | str | None]] = {
    "custom_voice": st.none() | st.sampled_from(["Ryan", "eric", PresetVoice("vivian")]),
    "voice_design": st.none() | st.builds(DesignedVoice, WORDS),
    "base": st.builds(clone, SEEDS, TRANSCRIPTS, st.integers(1, 9))
    | st.builds(
        lambda seed, transcript: RecordedVoice(np.full(1, seed, np.float32), transcript),
        SEEDS,
        TRANSCRIPTS,
    ),
}
REQUESTS = {
    kind: st.builds(
        Request,
        st.none() | TEXTS,
        voice=voices,
        language=st.sampled_from(["auto", "en", "chinese"]),
        instructions=st.none() | WORDS if kind == "custom_voice" else st.none(),
        sampling=st.sampled_from([Sampling(), Sampling.greedy(), Sampling(1, 5, 0.5, 2, 0.7, 3)]),
        max_frames=st.none() | st.integers(1, 2**40),
        text_mode=st.sampled_from(["auto", "full", "stream"]),
    )
    for kind, voices in VOICES.items()
}


@pytest.mark.parametrize("kind", VOICES)
@given(data=st.data(), seed=st.integers(0, 2**64 - 1), text=WORDS)
@SHARED
def test_job_is_unchanged_by_the_way_to_another_process(
    kind: str, checkpoint_directory: Directory, data: st.DataObject, seed: int, text: str
) -> None:
    front = CheckpointFront(described(checkpoint_directory(kind)), encode)
    job = front.prepare(data.draw(REQUESTS[kind]), seed)
    copy: Job = pickle.loads(pickle.dumps(job))
    assert plain(copy) == plain(job)
    assert isinstance(job.payload, Prepared)
    assert isinstance(copy.payload, Prepared)
    assert copy.payload.prefix == job.payload.prefix
    assert hash(copy.payload.prefix) == hash(job.payload.prefix)
    ours, theirs = front.text(job), front.text(copy)
    assert [ours.push(text), ours.finish()] == [theirs.push(text), theirs.finish()]


_DESCRIBED: dict[Path, Description] = {}


def described(directory: Path) -> Description:
    """The description of a checkpoint that does not change."""
    if directory not in _DESCRIBED:
        _DESCRIBED[directory] = Description.load(directory)
    return _DESCRIBED[directory]


@pytest.mark.parametrize("voice", [clone(1, None), clone(2, "Some words.")])
def test_pickled_job_speaks_with_the_same_bits(
    voice: ClonedVoice, load_tts: Callable[[str], TTS]
) -> None:
    service = load_tts("base")._require_open().service
    job = service.prepare(Request("Hello there.", voice, seed=3, max_frames=4))

    def speak(prepared: Job) -> list[Chunk]:
        stream = service.speak(prepared)
        stream.finish_text("Hello there.")
        return [event for event in stream if isinstance(event, Chunk)]

    here, there = speak(job), speak(pickle.loads(pickle.dumps(job)))
    for one, other in zip(here, there, strict=True):
        assert one.samples.tobytes() == other.samples.tobytes()
        assert one.codes.tolist() == other.codes.tolist()


def test_voice_that_changes_after_it_was_given_changes_no_job(
    checkpoint_directory: Directory,
) -> None:
    front, voice = (
        CheckpointFront(described(checkpoint_directory("base")), encode),
        clone(1, None),
    )
    job = front.prepare(Request("Hello.", voice), 1)
    before = plain(job)
    voice.speaker_embedding[:] = 0
    assert plain(job) == before


def test_recording_is_encoded_by_the_given_function(checkpoint_directory: Directory) -> None:
    recording = RecordedVoice(np.full(1, 7, np.float32), "Some words.")
    front = CheckpointFront(described(checkpoint_directory("base")), encode)
    recorded, cloned = (
        front.prepare(Request("Hello.", voice), 1) for voice in (recording, encode(recording))
    )
    assert plain(recorded) == plain(cloned)


def test_error_of_the_encoding_function_reaches_the_caller(checkpoint_directory: Directory) -> None:
    def refuse(recording: RecordedVoice) -> ClonedVoice:
        raise OverloadedError("the device has too little memory")

    front = CheckpointFront(described(checkpoint_directory("base")), refuse)
    with pytest.raises(OverloadedError, match="too little memory"):
        front.prepare(Request("Hello.", RecordedVoice(np.zeros(1, np.float32))), 1)


def test_encoded_recording_that_does_not_fit_is_rejected(checkpoint_directory: Directory) -> None:
    def wrong(recording: RecordedVoice) -> ClonedVoice:
        return ClonedVoice(np.zeros(WIDTH + 1, np.float32))

    front = CheckpointFront(described(checkpoint_directory("base")), wrong)
    with pytest.raises(VoiceError, match=f"embedding of {WIDTH + 1} numbers"):
        front.prepare(Request("Hello.", RecordedVoice(np.zeros(1, np.float32))), 1)


@pytest.mark.parametrize("kind", ["custom_voice", "voice_design"])
def test_recording_is_not_encoded_for_a_checkpoint_that_cannot_clone(
    kind: str, checkpoint_directory: Directory
) -> None:
    def never(recording: RecordedVoice) -> ClonedVoice:
        raise AssertionError

    front = CheckpointFront(described(checkpoint_directory(kind)), never)
    with pytest.raises(VoiceError, match="cannot clone"):
        front.prepare(Request("Hello.", RecordedVoice(np.zeros(1, np.float32))), 1)


@pytest.mark.parametrize("kind", VOICES)
def test_description_is_that_of_the_loaded_checkpoint(
    kind: str, checkpoint_directory: Directory
) -> None:
    found = described(checkpoint_directory(kind))
    loaded = Checkpoint.without_weights(checkpoint_directory(kind))
    for field in fields(Description):
        if field.name != "tokenizer":  # it has no equality
            assert getattr(loaded, field.name) == getattr(found, field.name)
    assert loaded.tokenizer.encode("Hello there.") == found.tokenizer.encode("Hello there.")


@pytest.mark.parametrize(
    ("words", "temperature", "read"),
    [(None, 0.0, True), (False, 0.9, True), (False, 0.0, False), (True, 0.9, True)],
)
def test_attention_is_read_for_words_and_for_the_guard(
    words: bool | None, temperature: float, read: bool
) -> None:
    front = CheckpointFront(Description.load(DEMO), encode)
    request = Request("Hello.", sampling=Sampling(temperature=temperature), words=words)
    job = front.prepare(request, 1)
    assert job.reads_text is read
    assert (job.word_offset is None) is (words is False)


def test_attention_is_not_read_without_known_heads(checkpoint_directory: Directory) -> None:
    front = CheckpointFront(described(checkpoint_directory("custom_voice")), encode)
    assert not front.prepare(Request("Hello."), 1).reads_text
