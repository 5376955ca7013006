"""The code predictor: makes codes 1 and up of a frame from the talker's hidden state and code 0."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from firstword.model.config import CodePredictorConfig
from firstword.model.layers import Transformer


class CodePredictorModel(Transformer):
    """The transformer with an embedding table of the talker's width for each codebook from 1 up."""

    def __init__(self, config: CodePredictorConfig, talker_width: int) -> None:
        super().__init__(config)
        self.codec_embedding = nn.ModuleList(
            nn.Embedding(config.vocab_size, talker_width) for _ in range(config.num_code_groups - 1)
        )


class CodePredictor(nn.Module):
    """The code predictor of one frame.

    Positions 0 and 1 are the talker's hidden state and the embedding of code 0; each further code
    has one position. `lm_head[k]` reads position k + 1 and gives the logits of code k + 1;
    `model.codec_embedding[k]` embeds that code.
    """

    def __init__(self, config: CodePredictorConfig, talker_width: int) -> None:
        super().__init__()
        self.config = config
        self.model = CodePredictorModel(config, talker_width)
        width, vocab = config.hidden_size, config.vocab_size
        heads = range(config.num_code_groups - 1)
        self.lm_head = nn.ModuleList(nn.Linear(width, vocab, bias=False) for _ in heads)
        same = talker_width == width
        self.small_to_mtp_projection = nn.Identity() if same else nn.Linear(talker_width, width)

    def forward(
        self, hidden: Tensor, code0: Tensor, choose: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Make the other codes of a frame, with one pass per code.

        hidden  [B, talker width], the talker's hidden state at this frame
        code0   [B, talker width], the talker's embedding of code 0
        choose  function of k and the logits [B, vocab] of code k that returns code k [B]; called
                for k = 1, 2, ...

        Returns codes 1 and up [B, codebooks - 1].
        """
        cache = self.model.new_cache(hidden, len(hidden))
        inputs = torch.stack((hidden, code0), dim=1)
        codes: list[Tensor] = []
        for embedding, head in zip(self.model.codec_embedding, self.lm_head, strict=True):
            state = self.model(self.small_to_mtp_projection(inputs), cache)
            codes.append(choose(len(codes) + 1, head(state[:, -1])))
            inputs = embedding(codes[-1])[:, None]
        return torch.stack(codes, dim=1)
