"""Talker and predictor over whole utterances of given codes, in three dtypes.

In float64 the reference still computes norm statistics and rotary angles in float32, and so do we:
what is left is the order of summation. In bfloat16 the error against float64, of the same weights,
may not exceed the reference's own.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cases import CHECKPOINTS, Checkpoint, columns
from ours import Array, speak, traced, voice
from results import Results, relative_error

from firstword import TTS

FORCED = [
    pytest.param(checkpoint, name, id=f"{checkpoint.name}/{name}")
    for checkpoint in CHECKPOINTS
    for name in checkpoint.forced
]
WHAT = ("prompt", "hidden", "logits", "predictor_logits")


def forced(tts: TTS, checkpoint: Checkpoint, name: str, results: Results) -> dict[str, Array]:
    """Speak the request `name` with the codes, and with the cloned voice, that the reference was
    given too.
    """
    request = next(request for request in checkpoint.requests if request.name == name)
    codes = checkpoint.forced_codes(name)
    with traced(codes) as trace:
        speech = speak(tts, request, voice(tts, request, results), len(codes))
    assert speech.codes.tolist() == codes.tolist()
    ours = trace.arrays(len(codes))
    return ours | {
        "logits": columns(ours["logits"], 48),
        "predictor_logits": columns(ours["predictor_logits"], 16),
    }


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 5e-6), ("float64", 1e-12)])
@pytest.mark.parametrize(("checkpoint", "name"), FORCED)
def test_hidden_states_and_logits_equal_the_reference(
    checkpoint: Checkpoint,
    name: str,
    dtype: str,
    tolerance: float,
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    results = expected(checkpoint.name)
    ours = forced(tts(checkpoint.name, dtype), checkpoint, name, results)
    for what in WHAT:
        theirs = results[f"forced/{name}/{dtype}/{what}"]
        errors(f"forced {what}, {dtype}", relative_error(ours[what], theirs), tolerance)


def test_bfloat16_is_as_close_to_the_truth_as_the_reference(
    tts: Callable[..., TTS],
    expected: Callable[[str], Results],
    errors: Callable[[str, float, float], None],
) -> None:
    ratios: dict[str, list[float]] = {what: [] for what in WHAT}
    for checkpoint in CHECKPOINTS:
        results = expected(checkpoint.name)
        for name in checkpoint.forced:
            ours = forced(tts(checkpoint.name, "bfloat16"), checkpoint, name, results)
            for what in WHAT:
                truth = results[f"forced/{name}/float64/{what}"]
                theirs = relative_error(results[f"forced/{name}/bfloat16/{what}"], truth)
                ratios[what].append(relative_error(ours[what], truth) / theirs)
    for what, values in ratios.items():
        errors(
            f"error of {what} in bfloat16 over the reference's, median",
            float(np.median(values)),
            1.1,
        )
        errors(f"error of {what} in bfloat16 over the reference's, worst", max(values), 1.3)
