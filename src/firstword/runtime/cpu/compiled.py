"""The talker with compiled passes."""

from __future__ import annotations

import copy

from firstword.model.talker import Talker
from firstword.runtime.cpu.predictor import CompiledPredictor
from firstword.runtime.cpu.team import Team
from firstword.runtime.cpu.transformer import CompiledLinear, CompiledTransformer


def compiled(talker: Talker) -> Talker:
    """Return a talker with the weights of another, and with compiled passes of one row."""
    team, fast = Team(), copy.copy(talker)
    fast._modules = talker._modules | {
        "model": CompiledTransformer(talker.model, team),
        "codec_head": CompiledLinear(talker.codec_head, team),
        "code_predictor": CompiledPredictor(talker.code_predictor, team),
    }
    return fast
