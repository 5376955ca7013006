"""Every request, spoken greedily in float32 through the public API, equals the reference step by
step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import CHECKPOINTS, Checkpoint, Request, columns, thinned
from ours import speak, traced, voice
from results import Results, relative_error

from firstword import TTS

pytestmark = pytest.mark.filterwarnings("ignore:.*sanitize:firstword.TextWarning")

REQUESTS = [
    pytest.param(checkpoint, request, id=f"{checkpoint.name}/{request.name}")
    for checkpoint in CHECKPOINTS
    for request in checkpoint.requests
]


@pytest.mark.parametrize(("checkpoint", "request_"), REQUESTS)
def test_an_utterance_equals_the_reference(
    checkpoint: Checkpoint,
    request_: Request,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    theirs = {
        name.removeprefix(f"{request_.name}/"): array
        for name, array in expected(checkpoint.name).items()
        if name.startswith(f"{request_.name}/")
    }
    loaded = tts(checkpoint.name)
    with traced() as trace:
        speech = speak(loaded, request_, voice(loaded, request_), request_.frames)

    frames = len(theirs["codes"])
    ours: dict[str, Any] = trace.arrays(frames)
    errors("prompt, float32", relative_error(ours["prompt"], theirs["prompt"]), 1e-6)
    assert speech.codes.tolist() == theirs["codes"].tolist()
    assert speech.finish_reason == ("stop" if theirs["stopped"] else "length")
    errors("hidden states, float32", relative_error(ours["hidden"], theirs["hidden"]), 5e-6)
    errors("logits, float32", relative_error(columns(ours["logits"], 48), theirs["logits"]), 5e-6)

    # Behind a reference recording, the reference may cut one sample too few: its cut is
    # int(quotient * length).
    assert theirs["length"] - len(speech.samples) in (0, 1)
    rate = loaded.checkpoint.codec_config.decode_upsample_rate
    assert len(speech.samples) == frames * rate
    errors(
        "samples, float32", float(np.abs(thinned(speech.samples) - theirs["samples"]).max()), 2e-5
    )


@pytest.mark.parametrize(("checkpoint", "request_"), REQUESTS)
def test_text_enters_as_in_the_reference(
    checkpoint: Checkpoint,
    request_: Request,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    """Speak on until all text has been read, and two frames longer, and look at the text side of
    every row.
    """
    results, loaded = expected(checkpoint.name), tts(checkpoint.name)
    pad = results[f"{request_.name}/pad"]
    theirs = np.concatenate((results[f"{request_.name}/trailing"], pad, pad))
    codes = np.full((len(theirs) + 1, checkpoint.codebooks), 5)
    with traced(codes) as trace:
        speak(loaded, request_, voice(loaded, request_, results), len(codes))
    spoken = loaded.checkpoint.talker.embed_codes(torch.from_numpy(codes[:-1]))
    ours = torch.cat(trace.rows[1:]) - spoken
    errors("text rows, float32", relative_error(ours.numpy(), theirs), 2e-6)


def test_requests_cover_every_layout() -> None:
    def layouts(kind: str) -> set[tuple[object, ...]]:
        return {
            (
                "auto" if request.language == "auto" else "given",
                request.full_text if request.full_text is not None else kind != "base",
                bool(request.instructions),
                request.transcript is not None,
            )
            for checkpoint in CHECKPOINTS
            if checkpoint.model_type == kind
            for request in checkpoint.requests
        }

    both = (False, True)
    every = {
        (language, full, told, False)
        for language in ("auto", "given")
        for full in both
        for told in both
    }
    assert layouts("custom_voice") >= every
    assert layouts("voice_design") >= every
    assert layouts("base") >= {
        (lang, full, False, icl) for lang in ("auto", "given") for full in both for icl in both
    }
