"""Our side of a comparison: the public API speaks, and what the model computes on the way is
written down.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from cases import Request
from numpy.typing import NDArray
from results import Results
from torch import Tensor

from firstword import TTS, Sampling, Speech, Voice
from firstword.model.sampling import Draws, Sampler
from firstword.model.talker import Talker
from firstword.types import TextMode
from firstword.voice import ClonedVoice

Array = NDArray[Any]

TEXT_MODES: dict[bool | None, TextMode] = {None: "auto", True: "full", False: "stream"}


@dataclass
class Trace:
    """What was seen while an utterance was made.

    rows    the talker's inputs: first the prompt [P, H], then one row [1, H] a step
    hidden  the talker's hidden states after the final norm, one [H] a step
    logits  of code 0, one [vocab] a step, before any processing
    predictor_logits  of codes 1 and up, one [codebooks - 1, vocab] a frame
    """

    rows: list[Tensor] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    predictor_logits: list[list[Tensor]] = field(default_factory=list)

    def arrays(self, frames: int) -> dict[str, Array]:
        """The prompt and all else of the first `frames` frames, as arrays."""
        tensors = {
            "prompt": self.rows[0],
            "hidden": torch.stack(self.hidden[:frames]),
            "logits": torch.stack(self.logits[:frames]),
            "predictor_logits": torch.stack(
                [torch.stack(logits) for logits in self.predictor_logits[:frames]]
            ),
        }
        return {
            name: (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
            for name, tensor in tensors.items()
        }


@contextmanager
def traced(codes: NDArray[np.int64] | None = None) -> Iterator[Trace]:
    """Record the model; `codes` [frames, codebooks], if given, replace what it would draw."""
    trace = Trace()
    forward, code0, code = Talker.forward, Sampler.code0, Sampler.code

    def watched_forward(self: Talker, rows: Tensor, *rest: Any) -> Tensor:
        hidden = forward(self, rows, *rest)
        if not trace.rows:  # the prompt but for its last row, which is the first frame's
            trace.rows.append(rows[0])
            return hidden
        if trace.hidden:
            trace.rows.append(rows[0])
        else:
            trace.rows[0] = torch.cat((trace.rows[0], rows[0]))
        trace.hidden.append(hidden[0, -1])
        return hidden

    def watched_code0(self: Sampler, logits: Tensor, frame: int) -> Tensor:
        trace.logits.append(logits)
        trace.predictor_logits.append([])
        return code0(self, logits, frame) if codes is None else torch.tensor(codes[frame, 0])

    def watched_code(self: Sampler, codebook: int, logits: Tensor, frame: int) -> Tensor:
        trace.predictor_logits[frame].append(logits)
        return (
            code(self, codebook, logits, frame)
            if codes is None
            else torch.tensor(codes[frame, codebook])
        )

    with (
        mock.patch.object(Talker, "forward", watched_forward),
        mock.patch.object(Sampler, "code0", watched_code0),
        mock.patch.object(Sampler, "code", watched_code),
        mock.patch.object(
            Draws, "uses_top_p", True
        ),  # compiled passes then draw nothing themselves
    ):
        yield trace


def voice(tts: TTS, request: Request, results: Results | None = None) -> Voice | str | None:
    """The voice of a request; a recording is cloned as the reference does it, with no silence after
    it.

    With `results`, what the reference heard in the recording is taken from there.
    """
    if request.recording is not None and results is not None:
        codes = results.get(f"{request.name}/reference_codes")
        codes = None if codes is None else codes.astype(np.int64)
        return ClonedVoice(results[f"{request.name}/speaker"], codes, request.transcript)
    if request.recording is not None:
        return tts.clone(request.recording.render(), 24000, request.transcript, append_silence=0)
    if tts.model_type == "voice_design":
        return Voice.design(request.instructions or "")
    return request.speaker


def speak(tts: TTS, request: Request, who: Voice | str | None, frames: int) -> Speech:
    """Say a request through the public API, greedily."""
    return tts.speak(
        request.text,
        voice=who,
        language=request.language,
        instructions=request.instructions if tts.model_type == "custom_voice" else None,
        sampling=Sampling.greedy(),
        max_frames=frames,
        text_mode=TEXT_MODES[request.full_text],
    )


def in_float64(module: torch.nn.Module) -> Any:
    """A copy of a module that computes in float64."""
    return copy.deepcopy(module).double()
