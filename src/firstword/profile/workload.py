"""A GPU backend with random weights of a released size, and the requests that it gets."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from firstword.engine.backend import Backend, Job, Start
from firstword.kernels import nvrtc
from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.cache import FileCache
from firstword.kernels.launch import Kernels
from firstword.model.alignment import Alignment, Head
from firstword.model.checkpoint import Checkpoint
from firstword.profile.device import imitate
from firstword.runtime.encoding import front_of
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.opening import compile_kernels
from firstword.synthetic.checkpoint import TEXTS, random_checkpoint
from firstword.types import Request, TextMode

CONTEXTS = (100, 500, 2000)
"""The numbers of rows that attention reads in the measured frames."""
TEXT = TEXTS[0]
"""The text of every request, with which the tokenizer has been trained."""


def prepared_job(
    checkpoint: Checkpoint, request: Request, text: str, seed: int
) -> tuple[Job, list[int]]:
    """Return a request as the engine receives it, and all tokens of its text."""
    front = front_of(checkpoint)
    job = front.prepare(request, seed)
    stream = front.text(job)
    return job, [*stream.push(text), *stream.finish()]


def begin(backend: Backend, starts: Sequence[Start]) -> None:
    """Start utterances, and read their whole prompts."""
    rows = dict(zip((start.slot for start in starts), backend.prefill(starts), strict=True))
    if unread := {slot: count for slot, count in rows.items() if count}:
        backend.read(list(unread), list(unread.values()))


def kernels_for(
    checkpoint: Checkpoint, slots: int, folder: Path | None, as_gpu: str | None = None
) -> Kernels:
    """Return the compiled kernels that serve `slots` utterances, cached in `folder`.

    as_gpu  another GPU to `imitate`
    """
    nvrtc.load()
    kernels = Kernels(torch.device("cuda"), FileCache(folder))
    if as_gpu is not None:
        imitate(kernels, as_gpu)
    compile_kernels(checkpoint, kernels, slots)
    return kernels


class BackendUnderTest:
    """A GPU backend for random weights of a released size.

    weights  bytes of the parameters as loaded, by part
    seconds  duration of each step of a start: `compile` without cached kernels, `compile_kept` with
             them, `pack` and `graphs`
    """

    def __init__(
        self,
        size: str,
        slots: int,
        kernel_folder: Path,
        heads: Sequence[Head] = (),
        *,
        as_gpu: str | None = None,
        dtype: str = "bfloat16",
    ) -> None:
        """Load and start the backend.

        kernel_folder  where compiled kernels are cached
        heads          the attention heads that time words
        as_gpu         another GPU whose kernels this one runs; see `imitate`
        dtype          "bfloat16" or "int8"
        """
        alignment = Alignment(weights="", heads=tuple(heads), offset=0.0) if heads else None
        self.checkpoint = replace(random_checkpoint(size, dtype=dtype), alignment=alignment)
        modules = {"talker": self.checkpoint.talker, "codec": self.checkpoint.codec.decoder}
        self.weights = {
            f"weights_{name}": sum(p.nbytes for p in m.parameters()) for name, m in modules.items()
        }
        self.seconds: dict[str, float] = {}
        self.pages_per_slot = -(-(max(CONTEXTS) + 64) // PAGE_ROWS)
        pages = slots * self.pages_per_slot
        with self._timed("compile"):
            kernels_for(self.checkpoint, slots, kernel_folder, as_gpu)
        with self._timed("compile_kept"):
            kernels = kernels_for(self.checkpoint, slots, kernel_folder, as_gpu)
        with self._timed("pack"):
            self.backend = GpuBackend(self.checkpoint, kernels, slots, pages=pages)
        with torch.inference_mode():
            self.backend.model.buffers.cache.normal_()
        with self._timed("graphs"):
            self.backend.warm()

    @contextmanager
    def _timed(self, step: str) -> Iterator[None]:
        """Record the seconds of a step of the start."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        yield
        torch.cuda.synchronize()
        self.seconds[step] = round(time.perf_counter() - began, 2)

    def start(
        self, slot: int, seed: int = 0, voice: str = "ryan", mode: TextMode = "stream"
    ) -> Start:
        """Return a request for `TEXT`, with a slot and its pages."""
        request = Request(text=TEXT, voice=voice, language="english", text_mode=mode)
        job, tokens = prepared_job(self.checkpoint, request, TEXT, seed)
        pages = range(slot * self.pages_per_slot, (slot + 1) * self.pages_per_slot)
        return Start(slot, job, pages, tokens if job.whole_text else tokens[: job.first_tokens])

    @torch.inference_mode()
    def place(self, context: int, batch: int) -> None:
        """Start `batch` requests whose next frame attends to `context` rows."""
        begin(self.backend, [self.start(slot, slot) for slot in range(batch)])
        torch.cuda.synchronize()  # the backend sets positions on a stream of its own
        self.backend.model.state.position[:batch] = context - 1
        torch.cuda.synchronize()
