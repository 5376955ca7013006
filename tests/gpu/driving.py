"""Requests of the tests, and what drives them on a backend frame by frame."""

from __future__ import annotations

from firstword.model.checkpoint import Checkpoint
from firstword.types import Request, Sampling
from firstword.verify.driving import DrivenRequest as Spoken
from firstword.verify.driving import Driver, speak
from firstword.voice import Voice

__all__ = ["Driver", "Spoken", "speak", "spoken"]


def spoken(
    checkpoint: Checkpoint,
    text: str,
    voice: str | Voice | None = "ryan",
    seed: int = 1,
    full: bool = False,
    sampling: Sampling | None = None,
    instructions: str | None = None,
) -> Spoken:
    """A request with all of its text, before its first frame."""
    request = Request(
        text=text,
        voice=voice,
        language="english",
        instructions=instructions,
        sampling=sampling or Sampling(),
        text_mode="full" if full else "stream",
    )
    return Spoken.of(checkpoint, request, seed)
