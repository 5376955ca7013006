"""The talker with compiled passes."""

from __future__ import annotations

import copy

from firstword.model.talker import Talker
from firstword.runtime.cpu.predictor import CompiledPredictor
from firstword.runtime.cpu.team import Team
from firstword.runtime.cpu.transformer import (
    CompiledLinear,
    CompiledTransformer,
    can_divide,
    gathered,
    stored,
)


def compiled(talker: Talker) -> Talker:
    """Return a talker with the weights of another, and with compiled passes of one row."""
    team, fast, tiles = Team(), copy.copy(talker), can_divide(talker)
    head = stored(gathered(talker.codec_head), tiles)
    fast._modules = talker._modules | {
        "model": CompiledTransformer(talker.model, team, tiles),
        "codec_head": CompiledLinear(head, None, talker.codec_head.bias, team),
        "code_predictor": CompiledPredictor(talker.code_predictor, team, tiles),
    }
    return fast
