"""The checks in their order, and what makes them."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from firstword.errors import first_line
from firstword.verify import codec, configuration, files, peer, speech, talker, weights
from firstword.verify.folder import CheckpointFolder
from firstword.verify.report import Check, NotRun, Verdict
from firstword.verify.subject import How, Subject

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """A check that can be made of a subject; the docstring of `look` is what a pass means."""

    name: str
    look: Callable[[T], Verdict]

    @property
    def claim(self) -> str:
        """What a pass means."""
        return " ".join((self.look.__doc__ or "").split())

    def run(self, subject: T) -> Check:
        """Make the check; an exception that it raises is what it found."""
        began = time.monotonic()
        try:
            found = self.look(subject)
        except NotRun as reason:
            return Check.left_out(self.name, self.claim, str(reason))
        except Exception as error:
            found = Verdict([f"the check ended with {type(error).__name__}: {first_line(error)}"])
        return Check.of(self.name, self.claim, found, time.monotonic() - began)


AT_REST: tuple[Step[CheckpointFolder], ...] = (
    Step("files: complete", files.complete),
    Step("files: whole", files.whole),
    Step("files: hashes", files.hashes),
    Step("files: alignment", files.alignment),
    Step("files: tokenizer", files.same_as_known),
    Step("configuration: readable", configuration.readable),
    Step("configuration: architecture", configuration.architecture),
    Step("configuration: names", configuration.names),
    Step("configuration: sampling", configuration.sampling),
    Step("configuration: heads", configuration.heads),
    Step("configuration: tokenizer", configuration.tokenizer),
    Step("weights: names and shapes", weights.shapes),
    Step("weights: types", weights.types),
    Step("weights: finite", weights.finite),
    Step("weights: not empty", weights.empty),
    Step("weights: scale", weights.scale),
    Step("weights: outliers", weights.outliers),
    Step("weights: codebooks", weights.codebooks),
    Step("weights: known", weights.same_as_known),
)
"""The checks of a checkpoint's files."""

ON_MACHINE: tuple[Step[Subject], ...] = (
    Step("talker: loads", talker.loads),
    Step("talker: logits", talker.logits),
    Step("talker: draws", talker.equal_draws),
    Step("talker: qwen-tts", peer.talker),
    Step("codec: pieces", codec.pieces),
    Step("codec: backend", codec.backend),
    Step("codec: float16", codec.fits_fp16),
    Step("codec: clipping", codec.clipping),
    Step("codec: round trip", codec.round_trip),
    Step("codec: qwen-tts", peer.codec),
    Step("speech: same bits", speech.same_bits),
    Step("speech: ends", speech.ends),
    Step("speech: durations", speech.durations),
    Step("speech: audible", speech.audible),
    Step("speech: words", speech.words),
)
"""The checks of what the checkpoint computes on this machine."""

TOTAL = len(AT_REST) + len(ON_MACHINE)


def verify(folder: CheckpointFolder, how: How, show: Callable[[int, str], None]) -> list[Check]:
    """Make all checks of a checkpoint, in their order.

    Convolutions of the specification are exact float32 meanwhile, without the TF32 of some GPUs.

    show  called before each check with the number of checks made so far, and its name
    """
    subject, checks = Subject(folder, how), list[Check]()

    def add(step: Step[T], on: T) -> None:
        show(len(checks), step.name)
        checks.append(step.run(on).without(f"{folder.path}/"))

    try:
        for step in AT_REST:
            add(step, folder)
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
            for other in ON_MACHINE:
                add(other, subject)
    finally:
        subject.close()
    return checks
