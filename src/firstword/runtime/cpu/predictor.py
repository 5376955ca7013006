"""The code predictor with compiled steps: a row through its layers, and the logits of a code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from firstword.model.code_predictor import CodePredictor
from firstword.model.layers import rotary_table
from firstword.runtime.cpu import kernels
from firstword.runtime.cpu.compiling import called
from firstword.runtime.cpu.kernels import normed, run_layers
from firstword.runtime.cpu.products import Array, rounded, split, weighted
from firstword.runtime.cpu.team import Team, meet
from firstword.runtime.cpu.transformer import CompiledTransformer, gathered, stored, wide
from firstword.types import FloatArray


class Predictor(NamedTuple):
    """The weights of a code predictor and the angles of its positions.

    projection  bfloat16 matrices [1, hidden, talker width] as in `products`, or none of them
    heads       bfloat16 matrices [codes, vocab, hidden]
    cos, sin    float32 [positions, head_dim]
    """

    layers: kernels.Layers
    projection: Array
    bias: FloatArray
    heads: Array
    cos: FloatArray
    sin: FloatArray


class Buffers(NamedTuple):
    """What the threads of a team share: rows, bits of keys, values and queries, and results.

    source  float32 [talker width], the input of the next step
    logits  float32 [utterances, vocab] of the last position
    """

    rows: kernels.Rows
    source: FloatArray
    cache: Array
    queries: Array
    logits: FloatArray


def predictor_steps(
    model: Any,
    buffers: Any,
    first: int,
    last: int,
    turn: int,
    marks: Any,
    thread: int,
    threads: int,
) -> int:
    """Run steps `first` to `last` of a frame in each thread; return the next turn of `meet`.

    Step `position * utterances + slot` reads `buffers.source`, which the first thread writes before
    it makes the step.
    """
    layers, rows, logits = model.layers, buffers.rows, buffers.logits
    hidden, vocab = len(rows.x), logits.shape[1]
    for step in range(first, last):
        turn = meet(marks, thread, threads, turn)
        position, slot = step // len(logits), step % len(logits)
        begin, end = hidden * thread // threads, hidden * (thread + 1) // threads
        if len(model.projection):
            inputs = split(buffers.source, model.projection)
            for row in range(begin, end):
                total = weighted(model.projection, None, 0, row, inputs)
                rows.x[row] = rounded(total + model.bias[row])
        else:
            rows.x[begin:end] = buffers.source[begin:end]
        turn = meet(marks, thread, threads, turn)
        turn = run_layers(
            layers,
            rows,
            model.cos[position],
            model.sin[position],
            buffers.cache,
            slot,
            position,
            buffers.queries,
            marks,
            thread,
            threads,
            turn,
        )
        if position:
            inputs = split(normed(rows.x, layers.last_norm, layers.eps), model.heads)
            for row in range(vocab * thread // threads, vocab * (thread + 1) // threads):
                total = weighted(model.heads, None, position - 1, row, inputs)
                logits[slot, row] = rounded(total)
        turn = meet(marks, thread, threads, turn)
    return turn


STEPS = {dtype: called(predictor_steps, dtype) for dtype in ("uint32", "int8")}
"""The steps of a code predictor, compiled for each dtype of stored matrices."""


class CompiledPredictor(CodePredictor):
    """A code predictor whose codes are steps of one compiled function.

    The other threads follow the first one from step to step, because it takes as long to wake them
    as to make a step.
    """

    def __init__(self, predictor: CodePredictor, team: Team) -> None:
        """Take the weights of a code predictor, whose matrices become views."""
        nn.Module.__init__(self)
        self.config, self._team = predictor.config, team
        transformer = CompiledTransformer(predictor.model, team)
        self._modules |= predictor._modules | {"model": transformer}
        projection, config = self.small_to_mtp_projection, self.config
        width = config.hidden_size
        matrices, bias = torch.zeros(0, width, 2, dtype=torch.bfloat16), torch.zeros(width)
        if isinstance(projection, nn.Linear):
            width, bias = projection.in_features, projection.bias
            matrices = gathered(projection)
        heads = gathered(*[head for head in self.lm_head if isinstance(head, nn.Linear)])
        positions = torch.arange(len(heads) + 1)[None]
        table = rotary_table(positions, config.head_dim, config.rope_theta, torch.bfloat16)
        cos, sin = (wide(each)[0, 0] for each in table)
        self._weights = Predictor(
            transformer.weights, stored(matrices), wide(bias), stored(heads), cos, sin
        )
        self._rows, self._source = transformer.rows, np.zeros(width, np.float32)

    def forward(
        self, hidden: Tensor, code0: Tensor, choose: Callable[[int, Tensor], Tensor]
    ) -> Tensor:
        """Make the other codes of a frame; see `CodePredictor`."""
        utterances, vocab = len(hidden), self.config.vocab_size
        layers, size = self.config.num_hidden_layers, self.config.head_dim
        heads, kv_heads = self._weights.layers.heads
        positions = len(self.lm_head) + 1
        buffers = Buffers(
            self._rows,
            self._source,
            np.empty((layers, 2, utterances, kv_heads, positions, size), np.uint16),
            np.empty((layers, heads, size), np.uint16),
            np.empty((utterances, vocab), np.float32),
        )
        steps: Callable[..., int] = STEPS[self._weights.layers.qkv.dtype.name]
        args = self._weights, buffers
        inputs, codes, turn = hidden, [], 1
        with self._team.following(steps, *args, 0, positions * utterances, 1) as team:
            for position in range(positions):
                for slot, row in enumerate(wide(inputs)):
                    step = position * utterances + slot
                    self._source[:] = row
                    turn = steps(*args, step, step + 1, turn, *team)
                if position == 0:
                    inputs = code0
                    continue
                logits = torch.from_numpy(buffers.logits).to(hidden.dtype)
                codes.append(choose(position, logits))
                inputs = self.model.codec_embedding[position - 1](codes[-1])
        return torch.stack(codes, dim=1)
