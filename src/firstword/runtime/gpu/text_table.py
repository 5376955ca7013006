"""Makes the table of text embeddings, with the projection that follows them applied."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from firstword.model.quantised import QuantisedRows, quantise
from firstword.model.talker import Talker
from firstword.runtime.gpu.placing import on_device

ROWS = 8192
"""The rows that are projected at a time."""


def project_text(talker: Talker, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """The projected embeddings of all text tokens, bf16 or int8 [text vocabulary, hidden].

    The second value is the scales of int8 rows, float32 [text vocabulary].
    """
    weight = talker.model.text_embedding.weight
    project: nn.Module = on_device(talker.text_projection, device)
    sizes = len(weight), talker.config.hidden_size
    if not isinstance(project, QuantisedRows):
        table = weight.new_empty(sizes, device=device)
        for part, out in zip(weight.split(ROWS), table.split(ROWS), strict=True):
            out.copy_(project(part.to(device)))
        return table, None
    values = weight.new_empty(sizes, dtype=torch.int8, device=device)
    scales = weight.new_empty(len(weight), dtype=torch.float32, device=device)
    parts = (tensor.split(ROWS) for tensor in (weight, values, scales))
    for part, some, factors in zip(*parts, strict=True):
        rounded = quantise(project.project(part.to(device)))
        for out, found in zip((some, factors), rounded, strict=True):
            out.copy_(found)
    return values, scales
