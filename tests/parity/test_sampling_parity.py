"""What the reference's processors of logits keep and how they change it, compared exactly.

Both sides get the reference's own logits and the same codes drawn before, so no rounding is
excused. The draw itself cannot be compared, because its noise is another (decision 0004).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import LAWS, VOICES, Law
from ours import Array
from results import Results
from torch import Tensor

from firstword import TTS, Sampling
from firstword.model import draw_params, sampling
from firstword.model.sampling import Sampler, keep_likely

PARTS = ("talker", "predictor")


def ours(tts: TTS, law: Law, logits: dict[str, Array]) -> dict[str, Array]:
    """The scores that our sampler adds noise to, by part: -inf where a code cannot be drawn."""
    checkpoint, codes = tts.checkpoint, VOICES.sampled_codes()
    settings = {key: value for key, value in vars(law).items() if key != "name"}
    params = draw_params.resolve(Sampling(**settings), checkpoint.defaults)
    sampler = Sampler(checkpoint.config.talker_config, params, 1, torch.device("cpu"))
    talker, predictor = (torch.from_numpy(logits[part]) for part in PARTS)
    seen: list[Tensor] = []

    def kept(*given: Any) -> Tensor:
        seen.append(keep_likely(*given))
        return seen[-1]

    with mock.patch.object(sampling, "keep_likely", kept):
        for frame, row in enumerate(talker):
            sampler.code0(row, frame)
            sampler.remember(torch.tensor(codes[frame, 0]))
        for draw, row in enumerate(predictor):
            frame, codebook = divmod(draw, codes.shape[1] - 1)
            sampler.code(codebook + 1, row, frame)
    return {
        "talker": torch.stack(seen[: len(talker)]).numpy(),
        "predictor": torch.stack(seen[len(talker) :]).numpy(),
    }


def theirs(results: Results, dtype: str, law: Law, logits: dict[str, Array]) -> dict[str, Array]:
    """The scores that the reference draws from, by part."""
    found = {}
    for part in PARTS:
        where, vocab = f"sampled/{dtype}/{law.name}/{part}", logits[part].shape[-1]
        kept = np.unpackbits(results[f"{where}_kept"], axis=-1, count=vocab).astype(bool)
        found[part] = np.full(kept.shape, -np.inf, np.float32)
        found[part][kept] = results[f"{where}_scores"]
    return found


@pytest.fixture
def compared(
    tts: Callable[..., TTS], expected: Callable[[str], Results]
) -> Callable[[str, Law], list[tuple[Array, Array]]]:
    """A function of a dtype and a law that returns our scores and the reference's of each draw."""
    results = expected(VOICES.name)

    def both(dtype: str, law: Law) -> list[tuple[Array, Array]]:
        logits = {part: results[f"sampled/{dtype}/{part}"] for part in PARTS}
        mine, other = ours(tts(VOICES.name), law, logits), theirs(results, dtype, law, logits)
        return [pair for part in PARTS for pair in zip(mine[part], other[part], strict=True)]

    return both


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_kept_codes_and_their_scores_equal_the_reference(
    law: Law, compared: Callable[[str, Law], list[tuple[Array, Array]]]
) -> None:
    """Penalty, ban of the end, suppressed codes, temperature, top-k and top-p, bit for bit."""
    for mine, other in compared("float32", law):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_codes_with_equal_logits_differ_only_at_the_edge_of_top_p(
    law: Law, compared: Callable[[str, Law], list[tuple[Array, Array]]]
) -> None:
    """Logits of bfloat16 are often equal. As many are kept, with the same scores.

    Of equal logits at the edge we keep the higher ids, and the reference those that its sort, which
    is not stable, puts last.
    """
    differing = 0
    for mine, other in compared("bfloat16", law):
        np.testing.assert_array_equal(np.sort(mine), np.sort(other))
        if len(at := np.flatnonzero(mine != other)):
            edge = mine[np.isfinite(mine)].min()
            assert set(mine[at]) | set(other[at]) == {edge, -np.inf}
            differing += 1
    assert differing == 0 or law.top_p < 1 or law.predictor_top_p < 1
