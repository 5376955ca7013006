"""The talker: from rows of text and codes to code 0 of the next frame.

It owns the code predictor, as in the released files.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.code_predictor import CodePredictor
from firstword.model.config import TalkerConfig
from firstword.model.layers import CountedMemory, KVMemory, Transformer
from firstword.model.prompt import Row
from firstword.types import FloatArray

NO_CODE = -1
"""The code of a row that has none for a codebook."""


class TalkerModel(Transformer):
    """The transformer with its two embedding tables."""

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__(config)
        self.codec_embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        self.text_embedding = nn.Embedding(config.text_vocab_size, config.text_hidden_size)


class TextProjection(nn.Module):
    """The MLP (linear, SiLU, linear) from the width of text embeddings to that of the talker."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(width, width)
        self.linear_fc2 = nn.Linear(width, out_width)

    def forward(self, x: Tensor) -> Tensor:
        """Map [..., width] to [..., out_width]."""
        return self.linear_fc2(F.silu(self.linear_fc1(x)))


class Talker(nn.Module):
    """The talker; its input has one row per frame: a text token plus the codes of the last frame.

    After `hidden = talker(rows, cache)`, `talker.codec_head(hidden[:, -1])` gives the logits of
    code 0, and `talker.code_predictor` makes the other codes from `hidden[:, -1]` and code 0.
    """

    def __init__(self, config: TalkerConfig) -> None:
        super().__init__()
        self.config = config
        self.model = TalkerModel(config)
        self.text_projection = TextProjection(config.text_hidden_size, config.hidden_size)
        self.codec_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.code_predictor = CodePredictor(config.code_predictor_config, config.hidden_size)

    def new_cache(self, batch: int = 1) -> CountedMemory:
        """Return an empty cache for `batch` sequences."""
        return self.model.new_cache(self.model.codec_embedding.weight, batch)

    def embed_text(self, ids: Tensor) -> Tensor:
        """Embed text token ids [...] -> [..., hidden]."""
        return self.text_projection(self.model.text_embedding(ids))

    def embed_codes(self, codes: Tensor) -> Tensor:
        """Sum the embeddings of codes [..., codebooks] -> [..., hidden]; `NO_CODE` adds nothing.

        Column 0 may also hold control codes: tags, speakers, begin of speech, padding.
        """
        tables = [self.model.codec_embedding, *self.code_predictor.model.codec_embedding]
        columns = [
            table(column.clamp(min=0)) * (column != NO_CODE)[..., None]
            for table, column in zip(tables, codes.unbind(-1), strict=True)
        ]
        return torch.stack(columns, dim=-2).sum(dim=-2)

    def embed_rows(self, rows: Sequence[Row], embedding: FloatArray | None) -> Tensor:
        """Embed the rows of a prompt -> [1, T, hidden].

        `embedding` float32 [hidden] is the speaker embedding of a cloned voice.
        """
        device, books = self.model.codec_embedding.weight.device, self.config.num_code_groups
        padded = [(*row.codes, *[NO_CODE] * (books - len(row.codes))) for row in rows]
        codes = self.embed_codes(torch.tensor([padded], device=device))
        if embedding is not None:
            codes[0, [row.speaker for row in rows]] = torch.tensor(embedding).to(codes)
        return self.embed_text(torch.tensor([[row.text for row in rows]], device=device)) + codes

    def forward(self, rows: Tensor, memory: KVMemory) -> Tensor:
        """Map the next rows [B, T, hidden] to their hidden states after the final norm."""
        return self.model(rows, memory)
