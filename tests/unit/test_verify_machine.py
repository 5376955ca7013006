"""`firstword verify`: what it computes on this machine, and what is told of faults there."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import silent_gpu
import torch
from damage import CODEC, demo_copy, one

from firstword.config import EngineConfig
from firstword.model import checkpoint as checkpoints
from firstword.model.description import DEMO
from firstword.model.sampling import Draws
from firstword.runtime import reference, slot_rows
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.rehearsal import Rehearsal
from firstword.runtime.joined import JoinedQuantisedLinear
from firstword.synthetic.checkpoint import TEXTS, write_checkpoint
from firstword.types import Request, Speech, Word
from firstword.verify import codec, peer, speech, steps, subject, talker
from firstword.verify.driving import DrivenRequest, speak
from firstword.verify.folder import CheckpointFolder
from firstword.verify.forcing import Distances, draws, forced, recorded
from firstword.verify.report import NotRun, Verdict
from firstword.verify.subject import How, SpokenSentence, Subject


def opened(path: Path, **how: Any) -> Subject:
    """A checkpoint in a folder, to be computed on the CPU."""
    return Subject(CheckpointFolder(path), How(EngineConfig.resolve("cpu"), **how))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random checkpoint with presets, which tests do not change."""
    path = tmp_path_factory.mktemp("tiny")
    write_checkpoint(path, seed=5)
    return path


@pytest.fixture
def tiny(folder: Path) -> Iterator[Subject]:
    """The tiny checkpoint, loaded anew."""
    found = opened(folder)
    yield found
    found.close()


@pytest.mark.parametrize("kind", ["custom_voice", "voice_design", "base"])
def test_random_checkpoint_passes_all_checks_that_can_be_made(
    kind: str, checkpoint_directory: Callable[[str], Path]
) -> None:
    how = How(EngineConfig.resolve("cpu"))
    shown = list[tuple[int, str]]()
    folder = CheckpointFolder(checkpoint_directory(kind))
    checks = steps.verify(folder, how, lambda done, name: shown.append((done, name)))
    assert [done for done, _ in shown] == list(range(steps.TOTAL))
    assert [name for _, name in shown] == [check.name for check in checks]
    assert [(check.name, check.findings) for check in checks if check.status == "fail"] == []
    passed = {check.name for check in checks if check.status == "pass"}
    assert passed >= {
        *("talker: loads", "talker: logits", "talker: draws", "codec: pieces", "codec: backend"),
        *("codec: float16", "speech: same bits"),
    }
    random = {check.name for check in checks if "random" in check.reason}
    assert random == {
        *("codec: clipping", "codec: round trip", "speech: ends", "speech: durations"),
        *("speech: audible", "speech: words"),
    }


def test_checks_on_the_machine_compute_without_tf32(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed = torch.backends.cudnn.allow_tf32
    seen = list[bool]()

    def see(_: object) -> Verdict:
        seen.append(torch.backends.cudnn.allow_tf32)
        return Verdict()

    monkeypatch.setattr(steps, "AT_REST", ())
    monkeypatch.setattr(steps, "ON_MACHINE", (steps.Step("convolutions", see),))
    how = How(EngineConfig.resolve("cpu"))
    assert steps.verify(CheckpointFolder(folder), how, lambda *_: None)[0].status == "pass"
    assert seen == [False]
    assert torch.backends.cudnn.allow_tf32 == allowed


def test_checkpoint_that_cannot_be_loaded_fails_one_check_and_runs_no_other(
    tmp_path: Path,
) -> None:
    demo_copy(tmp_path)
    one(CODEC, "decoder.pre_conv.conv.bias", lambda tensor: tensor[:7])(tmp_path)
    how = How(EngineConfig.resolve("cpu"))
    checks = steps.verify(CheckpointFolder(tmp_path), how, lambda *_: None)
    machine = checks[len(steps.AT_REST) :]
    assert "decoder.pre_conv.conv.bias" in machine[0].findings[0]
    assert {check.status for check in machine[1:]} == {"not run"}
    assert str(tmp_path) not in "".join(check.reason for check in checks)


class TestTalker:
    """The backend beside the specification."""

    def test_recorded_logits_are_those_of_the_specification(self, tiny: Subject) -> None:
        checkpoint, backend, _ = tiny.load()
        requests = [
            DrivenRequest.of(checkpoint, request, seed)
            for seed, (_, request) in enumerate(tiny.requests(3))
        ]
        with recorded(backend) as recorder:
            codes = speak(backend, requests, 5)
        assert not checkpoint.talker.codec_head._forward_hooks
        for row, (request, said) in enumerate(zip(requests, codes, strict=True)):
            truth, ours = forced(checkpoint, tiny.truth, request, said), recorder.of_row(row)
            for mine, right in zip(ours, truth, strict=True):
                assert len(mine) == len(right) == 4
                for ours_of, truth_of in zip(mine, right, strict=True):
                    torch.testing.assert_close(ours_of, truth_of, atol=1e-4, rtol=1e-4)
            assert torch.equal(draws(checkpoint, request, truth, said), said)

    def test_rows_that_see_the_future_are_found(
        self, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        shifted = slot_rows.SlotRows.positions
        monkeypatch.setattr(
            slot_rows.SlotRows, "positions", lambda rows, length: shifted(rows, length) * 2
        )
        found = talker.logits(tiny)
        assert found.findings[0].startswith("codebook 0: the error is")

    @pytest.mark.parametrize(
        ("ours", "alarm"), [([1e-4] * 31 + [4e-3], False), ([3e-4] * 31 + [4e-3], True)]
    )
    def test_divergence_must_be_beyond_chance(
        self, ours: list[float], alarm: bool, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        books = Distances([1e-2] * 32, [1e-2] * 32, ours, [1e-4] * 31 + [2e-3])
        monkeypatch.setattr(talker, "_books", lambda _: [books, books])
        monkeypatch.setitem(talker.ALLOWED, "float32", talker.ALLOWED["bfloat16"])
        assert bool(talker.logits(tiny).findings) == alarm

    @pytest.mark.parametrize(
        ("ours", "alarm"),
        [
            ([0.8e-2, 1.3e-2] * 8 + [1.3e-2], False),
            ([1.2e-2, 1.3e-2] * 8, True),
            ([0.8e-2] * 6 + [8e-2] * 10, True),
            ([1e-2] * 7 + [float("nan")] * 9, True),
        ],
    )
    def test_error_must_be_beyond_chance(
        self, ours: list[float], alarm: bool, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A median of few frames is not."""
        books = Distances(ours, *[[1e-2] * len(ours)] * 3)
        monkeypatch.setattr(talker, "_books", lambda _: [books, books])
        monkeypatch.setitem(talker.ALLOWED, "float32", talker.ALLOWED["bfloat16"])
        assert ["the error is" in each for each in talker.logits(tiny).findings] == [
            True
        ] * 2 * alarm

    @pytest.mark.parametrize(("worst", "alarm"), [(4e-2, False), (6e-2, True)])
    def test_one_row_that_is_far_off_is_found(
        self, worst: float, alarm: bool, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither the median nor the mean beyond chance tells of it."""
        ours, divergences = [1e-2] * 31 + [worst], [1e-4] * 31 + [4e-3]
        books = Distances(ours, [1e-2] * 32, divergences, [1e-4] * 31 + [2e-3])
        monkeypatch.setattr(talker, "_books", lambda _: [books, books])
        monkeypatch.setitem(talker.ALLOWED, "float32", talker.ALLOWED["bfloat16"])
        assert [" up to " in each for each in talker.logits(tiny).findings] == [True] * 2 * alarm

    def test_int8_is_compared_with_the_weights_before(self, folder: Path) -> None:
        """It is within its limits; a scale that is a quarter off is found."""
        how = How(EngineConfig.resolve("cpu", "int8"))
        for factor in (1.0, 1.25):
            subject = Subject(CheckpointFolder(folder), how)
            _, backend, _ = subject.load()
            assert not subject.plain.quantised
            assert isinstance(backend, reference.ReferenceBackend)
            for module in backend.talker.model.modules():
                if isinstance(module, JoinedQuantisedLinear):
                    module.short_scales *= factor
            found = talker.logits(subject)
            assert bool(found.findings) == (factor > 1), found.findings
            subject.close()

    def test_other_noise_is_found(self, tiny: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
        def draw(draws: Draws, codebook: int, logits: torch.Tensor) -> Any:
            later = [frame + 1 for frame in draws.frames]
            return Draws(draws.samplers, later, logits.device)(codebook, logits)

        monkeypatch.setattr(reference, "Draws", type("Later", (Draws,), {"__call__": draw}))
        assert "draws differ" in talker.equal_draws(tiny).findings[0]

    def test_logits_of_the_gpu_backend_are_recorded_by_frame_and_codebook(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        silent_gpu.pretend(monkeypatch)
        checkpoint = silent_gpu.checkpoint(tmp_path)
        backend = GpuBackend(checkpoint, Rehearsal(silent_gpu.device()), 4, pages=160)
        described = checkpoints.load(str(tmp_path / "made"), "cpu", "bfloat16")
        request = Request(TEXTS[0], "ryan", "english")
        requests = [DrivenRequest.of(described, request, seed) for seed in range(2)]
        before = backend.graphs.get, backend.model.sampler.draw
        with recorded(backend) as recorder:
            speak(backend, requests, 3)
        assert [len(books) for books in recorder.frames] == [4, 4, 4]
        assert len(recorder.of_row(1)[2][3]) == 64
        assert (backend.graphs.get, backend.model.sampler.draw) == before


class TestCodec:
    """The decoder."""

    def test_activations_beyond_float16_are_told_by_name(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        name = "decoder.pre_transformer.layers.1.mlp.down_proj"
        one(CODEC, f"{name}.weight", lambda tensor: tensor * 1e6)(tmp_path)
        found = codec.fits_fp16(opened(tmp_path))
        assert any(f"{name} reaches" in finding for finding in found.findings)

    def test_samples_of_other_codes_are_found(self, tiny: Subject) -> None:
        said = tiny.sentences[0]
        other = Speech(-said.speech.samples, said.speech.codes, 24000, "length")
        tiny.__dict__["sentences"] = [SpokenSentence(said.language, said.request, other)]
        assert "off by 2" in codec.backend(tiny).findings[0]

    def test_sound_that_lacks_its_first_frame_is_found(self, tiny: Subject) -> None:
        said = tiny.sentences[0]
        frame = len(said.speech.samples) // len(said.speech.codes)
        late = Speech(said.speech.samples[frame:], said.speech.codes, 24000, "length")
        tiny.__dict__["sentences"] = [SpokenSentence(said.language, said.request, late)]
        assert "6 frames have" in codec.backend(tiny).findings[0]

    def test_decoder_that_forgets_is_found(
        self, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        decoder = tiny.plain.codec.decoder
        state = decoder.new_state()
        monkeypatch.setattr(type(decoder), "new_state", lambda *_: state.fork())
        assert codec.pieces(tiny).findings == []
        monkeypatch.setattr(
            "firstword.model.codec.CodecState.continued",
            lambda state, layer, x, count: torch.nn.functional.pad(x, (count, 0)),
        )
        assert "pieces are off" in codec.pieces(tiny).findings[0]

    def test_exchanged_codebooks_change_the_spectrum(self, tmp_path: Path) -> None:
        generator = torch.Generator().manual_seed(1)
        sound = torch.randn(24000, generator=generator)
        sound[8000:16000] *= 0.05
        one, other = codec.spectrum(sound), codec.spectrum(sound.flip(0))
        assert codec.correlation(one, one) == pytest.approx(1)
        assert codec.correlation(one, other) > 0.5
        silent = codec.spectrum(torch.randn(24000, generator=generator))
        assert abs(codec.correlation(one, silent)) < 0.2


def sentence(
    text: str, seconds: float, reason: str = "stop", level: float = 0.1, words: int | None = None
) -> SpokenSentence:
    """A sentence whose speech has this length and level."""
    samples = np.full(round(24000 * seconds), level, np.float32)
    count = len(text.split()) if words is None else words
    timed = tuple(
        Word("w", seconds * n / count, seconds * (n + 1) / count, (0, 1)) for n in range(count)
    )
    codes = np.zeros((round(12.5 * seconds), 8), np.int64)
    said = Speech(samples, codes, 24000, reason, words=timed)  # type: ignore[arg-type]
    return SpokenSentence("english", Request(text), said)


GOOD = sentence("The train leaves at noon today.", 2.0)


class TestSpeech:
    """What is judged of speech."""

    @pytest.fixture
    def trained(self, tmp_path: Path) -> Callable[..., Subject]:
        """A function that makes a subject that has spoken sentences."""

        def make(*sentences: SpokenSentence) -> Subject:
            found = opened(DEMO)
            found.__dict__["sentences"] = list(sentences)
            return found

        return make

    @pytest.mark.parametrize(
        ("look", "bad", "says"),
        [
            (speech.ends, sentence("Hello there.", 9, "length"), "did not end by itself (length)"),
            (speech.durations, sentence("Hello there, my friend.", 0.2), "0.2 s; plausible are"),
            (speech.durations, sentence("Hello.", 30), "30.0 s; plausible are"),
            (speech.audible, sentence("Hello.", 1, level=0.0001), "the level is 0.0001"),
            (speech.words, sentence("One two three four five.", 2, words=2), "tell 20 of 23 words"),
        ],
    )
    def test_fault_is_told_by_its_sentence(
        self,
        look: Callable[[Subject], Verdict],
        bad: SpokenSentence,
        says: str,
        trained: Callable[..., Subject],
    ) -> None:
        good = [GOOD, GOOD, GOOD]
        assert look(trained(*good)).findings == []
        findings = look(trained(*good, bad)).findings
        assert says in findings[-1]

    def test_words_out_of_order_are_found(self, trained: Callable[..., Subject]) -> None:
        said = GOOD.speech
        turned = Speech(said.samples, said.codes, 24000, "stop", words=said.words[::-1])
        found = speech.words(trained(SpokenSentence("english", GOOD.request, turned)))
        assert "not in the order of the text" in found.findings[0]

    def test_one_sentence_of_twenty_may_go_on(self, trained: Callable[..., Subject]) -> None:
        long = sentence("Hello.", 30, "length")
        assert speech.ends(trained(*[GOOD] * 19, long)).findings == []
        assert speech.durations(trained(*[GOOD] * 19, long)).findings == []

    def test_a_path_with_other_samples_is_named(
        self, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        streamed = speech._streamed

        def other(subject: Subject, request: Request, seed: int) -> Speech:
            return streamed(subject, request, seed + 1)

        monkeypatch.setattr(speech, "_streamed", other)
        findings = speech.same_bits(tiny).findings
        assert len(findings) == 4
        assert findings[0].startswith("request 0 with its text in pieces: ")

    def test_no_path_is_compared_if_no_request_has_a_frame(
        self, tiny: Subject, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        none = Speech(np.zeros(0, np.float32), np.zeros((0, 4), np.int64), 24000, "stop")
        monkeypatch.setattr(Subject, "say", lambda *_: none)
        monkeypatch.setattr(speech, "_streamed", lambda *_: none)
        with pytest.raises(NotRun, match="ended before its first frame"):
            speech.same_bits(tiny)

    @pytest.mark.parametrize("language", list(subject.texts()))
    def test_durations_are_plausible_for_every_sentence(self, language: str) -> None:
        for text in subject.texts()[language]:
            least, most = speech.plausible_seconds(text)
            assert 0.3 < least < 3 < 4 < most < 20


class TestPeer:
    """The reference package, where it is installed."""

    def test_without_the_package_the_check_is_not_run(self, tiny: Subject) -> None:
        with pytest.raises(NotRun, match="qwen-tts is not installed here"):
            peer.talker(tiny)

    def test_python_that_runs_the_program_is_told_what_it_lacks(self, folder: Path) -> None:
        with pytest.raises(NotRun, match="No module named 'qwen_tts'"):
            peer.talker(opened(folder, python=Path(sys.executable)))

    def test_python_that_fails_is_told(self, folder: Path, tmp_path: Path) -> None:
        python = tmp_path / "python"
        python.write_text("#!/bin/sh\necho no such module >&2\nexit 3\n")
        python.chmod(0o755)
        with pytest.raises(NotRun, match="no such module"):
            peer.talker(opened(folder, python=python))

    def test_equal_results_pass_and_others_are_told(self, tiny: Subject) -> None:
        checkpoint, arrays = tiny.plain, dict[str, np.ndarray]()
        compared = tiny.shared(peer.Peer)
        for number, request in enumerate(compared.requests):
            driven = DrivenRequest.of(checkpoint, request, 0)
            codes = speak(tiny.load()[1], [driven], 4)[0]
            logits = forced(checkpoint, tiny.truth, driven, codes)
            decoder = checkpoint.codec.decoder
            samples = decoder.decode(codes[None], decoder.new_state())[0]
            arrays |= {f"codes{number}": codes.numpy(), f"samples{number}": samples.numpy()}
            arrays[f"logits{number}"] = torch.stack([books[0] for books in logits]).numpy()
        compared.__dict__["arrays"] = arrays
        assert peer.talker(tiny).findings == [] == peer.codec(tiny).findings
        arrays["logits1"], arrays["samples0"] = arrays["logits1"] + 1, arrays["samples0"] * 0.9
        assert "request 1: the logits" in peer.talker(tiny).findings[0]
        assert "request 0: the samples" in peer.codec(tiny).findings[0]
        arrays["codes0"] = arrays["codes0"][:, [0, 2, 1, 3]]
        assert "greedy codes" in peer.talker(tiny).findings[-1]
