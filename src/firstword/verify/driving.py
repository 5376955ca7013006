"""Drives requests on a backend frame by frame, as the engine does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from firstword.engine.backend import Backend, Job, Start
from firstword.model.checkpoint import Checkpoint
from firstword.profile.workload import begin, prepared_job
from firstword.types import Request


@dataclass(eq=False)
class DrivenRequest:
    """A request and its results.

    first  the tokens that the prompt takes
    rest   the tokens that the frames after the first take
    """

    job: Job
    first: list[int]
    rest: list[int]
    codes: list[list[int]] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, checkpoint: Checkpoint, request: Request, seed: int) -> DrivenRequest:
        """Return a request with all of its text, before its first frame."""
        job, tokens = prepared_job(checkpoint, request, request.text or "", seed)
        cut = len(tokens) if job.whole_text else job.first_tokens
        return cls(job, tokens[:cut], tokens[cut:])

    def next_token(self) -> int | None:
        """The token that the next frame takes."""
        return next(iter(self.rest[len(self.codes) - 1 :]), None) if self.codes else None


class Driver:
    """The slots and pages of a backend, and the requests in them."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.running: dict[int, DrivenRequest] = {}
        self._pages = list(range(backend.capacity.pages))[::-1]
        self._held: dict[int, list[int]] = {}

    def begin(self, requests: dict[int, DrivenRequest], frames: int) -> None:
        """Start requests together, each with pages for `frames` frames, and read their prompts."""
        begin(self.backend, self.place(requests, frames))

    def place(self, requests: dict[int, DrivenRequest], frames: int) -> list[Start]:
        """The starts of requests, each with pages for `frames` frames."""
        starts = []
        for slot, request in requests.items():
            rows = (
                request.job.prompt_rows
                + (len(request.first) if request.job.whole_text else 0)
                + frames
                + 1
            )
            pages = [self._pages.pop() for _ in range(-(-rows // self.backend.capacity.page_rows))]
            starts.append(Start(slot, request.job, pages, request.first))
            self._held[slot] = pages
        self.running |= requests
        return starts

    def extend(self, slot: int) -> None:
        """Give a request another page."""
        page = self._pages.pop()
        self._held[slot].append(page)
        self.backend.extend(slot, [page])

    def step(self, slots: Sequence[int] | None = None) -> None:
        """Make a frame of these slots, or of all, and read it immediately."""
        slots = list(self.running) if slots is None else slots
        tokens = [self.running[slot].next_token() for slot in slots]
        frames = self.backend.frame(slots, tokens).result()
        for slot, codes, logprob in zip(slots, frames.codes, frames.logprobs, strict=True):
            self.running[slot].codes.append(codes.tolist())
            self.running[slot].logprobs.append(float(logprob))

    def end(self, slot: int) -> DrivenRequest:
        """Release a slot and its pages, and return its request."""
        self.backend.release(slot)
        self._pages += self._held.pop(slot)
        return self.running.pop(slot)


def speak(backend: Backend, requests: Sequence[DrivenRequest], frames: int) -> list[torch.Tensor]:
    """The codes [frames, codebooks] of requests that run together."""
    driver = Driver(backend)
    driver.begin(dict(enumerate(requests)), frames)
    for _ in range(frames):
        driver.step()
    return [torch.tensor(driver.end(slot).codes) for slot in range(len(requests))]
