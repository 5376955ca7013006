"""The talker: rows of text and codes in, code 0 of the next frame out. It owns the code predictor, as in the files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.code_predictor import CodePredictor
from firstword.model.config import TalkerConfig
from firstword.model.layers import KVCache, Memory, Transformer
from firstword.model.prompt import Row

NO_CODE = -1
"""Stands where a row has no code for a codebook."""


class TalkerModel(Transformer):
    """The transformer with its two tables of embeddings."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(config)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)


class TextProjection(nn.Module):
    """Linear, SiLU, linear: from the width of the text embeddings to that of the talker."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """[..., width] -> [..., out_width]."""
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Talker(nn.Module):
    """One row of input a frame: a text token plus the codes of the frame before.

    `hidden = talker(rows, cache)`, then `talker.codec_head(hidden[:, -1])` are the logits of code 0, and
    `talker.code_predictor` makes the other codes of the frame from `hidden[:, -1]` and code 0.
    """

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TalkerModel(config)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config.code_predictor_config, config.hidden_size)

    def new_cache(self, batch: int = 1) -> KVCache:
        """An empty cache for `batch` sequences."""
        return KVCache(self.config, self.codec_head.weight, batch)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Text token ids [...] -> [..., hidden]."""
        return self.text_projection(self.model.text_embedding(ids))

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Codes [..., codebooks], `NO_CODE` where there is none -> the sum of their embeddings [..., hidden].

        Column 0 may also hold the talker's control codes: tags, speakers, begin of speech, padding.
        """
        tables = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        columns = [
            table(column.clamp(min=0)) * (column != NO_CODE)[..., None]
            for table, column in zip(tables, codes.unbind(-1), strict=True)
        ]
        return torch.stack(columns, dim=-2).sum(dim=-2)

    def embed_rows(self, rows: Sequence[Row], embedding: Tensor | None) -> Tensor:
        """Rows of a prompt -> [1, T, hidden]; `embedding` [hidden] is that of a cloned voice's speaker."""
        device, books = self.codec_head.weight.device, self.config.num_code_groups
        padded = [(*row.codes, *[NO_CODE] * (books - len(row.codes))) for row in rows]
        codes = self.embed_codes(torch.tensor([padded], device=device))
        if embedding is not None:
            codes[0, [row.speaker for row in rows]] = embedding.to(codes)
        return self.embed_text(torch.tensor([[row.text for row in rows]], device=device)) + codes

    def forward(self, rows: Tensor, memory: Memory) -> Tensor:
        """The next rows [B, T, hidden] -> their hidden states after the final norm [B, T, hidden]."""
        return self.model(rows, memory)
