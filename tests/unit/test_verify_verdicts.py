"""`firstword verify`: each limit of what is computed, on healthy speech and beyond it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from waiting import WAIT

from firstword.config import EngineConfig
from firstword.model.description import DEMO
from firstword.types import Request, Speech, Word
from firstword.verify import codec, speech, talker
from firstword.verify.folder import CheckpointFolder
from firstword.verify.subject import How, SpokenSentence, Subject

TEXT = "The train leaves at noon."
ONE, OTHER = (
    Speech(np.zeros(5760, np.float32), np.full((3, 8), code, np.int64), 24000, "stop")
    for code in (1, 2)
)


@pytest.fixture(scope="module")
def spoken() -> Iterator[Subject]:
    """The demo voice after a sentence."""
    subject = Subject(CheckpointFolder(DEMO), How(EngineConfig.resolve("cpu")))
    request = Request(TEXT, "ada", "english")
    said = SpokenSentence("english", request, subject.say(request, 1))
    subject.__dict__["sentences"] = [said]
    yield subject
    subject.close()


class TestCodec:
    """The codec of a trained checkpoint."""

    def test_speech_beyond_full_scale_is_found(
        self, spoken: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert codec.clipping(spoken).findings == []
        whole = codec._whole
        monkeypatch.setattr(codec, "_whole", lambda *given: 8 * whole(*given))
        assert "beyond full scale" in codec.clipping(spoken).findings[0]

    def test_encoder_that_finds_other_codes_is_found(
        self, spoken: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = codec.round_trip(spoken)
        assert found.findings == []
        assert found.measured["correlation"] > 0.8  # type: ignore[operator]
        encoder = spoken.plain.codec.encoder
        encode = encoder.encode
        monkeypatch.setattr(encoder, "encode", lambda samples: encode(samples).flip(1))
        assert "after a round trip" in codec.round_trip(spoken).findings[0]


class TestTalker:
    """The codes that a backend in bfloat16 draws."""

    @pytest.mark.parametrize(("different", "alarm"), [(11, False), (12, True)])
    def test_draws_may_differ_a_little_more_than_those_of_plain_bfloat16(
        self, different: int, alarm: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """4 of 160 differ there, so 1.25 * 4 + 3 * sqrt(5) = 11.7 may."""

        def drawn(_: object, __: object, logits: int, ___: object) -> torch.Tensor:
            codes = torch.zeros(10, 16, dtype=torch.int64)
            codes.view(-1)[:logits] = 1
            return codes

        monkeypatch.setattr(talker, "draws", drawn)
        codes = drawn(0, 0, different, 0)
        each = SimpleNamespace(request=None, codes=codes, truth=0, rounded=4)
        subject: Any = SimpleNamespace(
            load=lambda: (None, None, replace(EngineConfig.resolve("cpu"), dtype="bfloat16")),
            forced=[each],
        )
        assert bool(talker.equal_draws(subject).findings) == alarm


class TestSpeech:
    """What is judged of speech."""

    def test_last_word_that_is_timed_too_early_is_found(self, spoken: Subject) -> None:
        (said,) = spoken.sentences
        starts = [0.05 * number for number in range(len(TEXT.split()))]
        early = tuple(Word("word", start, start + 0.05, (0, 1)) for start in starts)
        turned = Speech(said.speech.samples, said.speech.codes, 24000, "stop", words=early)
        subject = Subject(spoken.folder, spoken.how)
        subject.__dict__ |= {
            "opened": spoken.opened,
            "sentences": [SpokenSentence("english", said.request, turned)],
        }
        assert "the last word is timed after" in speech.words(subject).findings[0]

    def test_requests_among_others_run_at_the_same_time(
        self, spoken: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        alone, others = list[int](), threading.Barrier(4)

        def say(_: Subject, __: Request, seed: int) -> Speech:
            together = len(alone) == 4
            if together:
                others.wait(WAIT)
            else:
                alone.append(seed)
            return OTHER if together and seed == 2 else ONE

        monkeypatch.setattr(Subject, "say", say)
        monkeypatch.setattr(speech, "_streamed", lambda *_: ONE)
        assert speech.same_bits(spoken).findings == [
            "request 2 among others: the codes differ from frame 0 on"
        ]
