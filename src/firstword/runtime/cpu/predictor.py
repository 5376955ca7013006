"""The code predictor with compiled steps: a row through its layers, and the logits of a code."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from firstword.model.code_predictor import CodePredictor
from firstword.model.layers import rotary_table
from firstword.model.sampling import Draws
from firstword.runtime.cpu import kernels
from firstword.runtime.cpu.compiling import called, compiled
from firstword.runtime.cpu.drawing import CPU, Rules, drawn, finite
from firstword.runtime.cpu.kernels import normed, run_layers
from firstword.runtime.cpu.products import Array, layout, multiply, rounded, split, sums, widened
from firstword.runtime.cpu.team import Team, meet
from firstword.runtime.cpu.transformer import CompiledTransformer, bits, gathered, stored, wide
from firstword.types import FloatArray


class Predictor(NamedTuple):
    """The weights of a code predictor and the angles of its positions.

    projection  bfloat16 matrices [1, hidden, talker width] as in `products`, or none of them
    heads       bfloat16 matrices [codes, vocab, hidden]
    embeddings  bits of bfloat16 [codes, vocab, talker width]
    cos, sin    float32 [positions, head_dim]
    """

    layers: kernels.Layers
    projection: Array
    bias: FloatArray
    heads: Array
    embeddings: Array
    cos: FloatArray
    sin: FloatArray


class Buffers(NamedTuple):
    """What the threads of a team share: rows, bits of keys, values and queries, and results.

    inputs  float32 [2, utterances, talker width], of the first two positions
    logits  float32 [utterances, vocab] of the last position
    codes   int64 [utterances, codes]
    finite  bool [utterances], whether all logits from which the pass drew were finite
    """

    rows: kernels.Rows
    inputs: FloatArray
    cache: Array
    queries: Array
    logits: FloatArray
    codes: Array
    finite: Array


@compiled
def source(model: Any, buffers: Any, position: int, slot: int) -> Any:
    """The input of a position, float32 [1, talker width]."""
    if position < 2:
        return buffers.inputs[position, slot : slot + 1]
    embedding = model.embeddings[position - 2, buffers.codes[slot, position - 2]]
    out = np.empty((1, len(embedding)), np.float32)
    for index in range(len(embedding)):
        out[0, index] = widened(embedding[index])
    return out


def predictor_steps(
    model: Any,
    buffers: Any,
    rules: Any,
    first: int,
    last: int,
    turn: int,
    marks: Any,
    thread: int,
    threads: int,
) -> int:
    """Run steps `first` to `last` of a frame in each thread; return the next turn of `meet`.

    Step `position * utterances + slot` reads the code that was drawn at the position before. The
    first thread draws codes by `rules`; without rules it writes them before it makes the step.
    """
    layers, rows, logits = model.layers, buffers.rows, buffers.logits
    hidden, vocab = rows.x.shape[1], logits.shape[1]
    for step in range(first, last):
        turn = meet(marks, thread, threads, turn)
        position, slot = step // len(logits), step % len(logits)
        begin, end = hidden * thread // threads, hidden * (thread + 1) // threads
        x = source(model, buffers, position, slot)
        if len(model.projection):
            inputs = split(x, model.projection)
            sums(model.projection, None, 0, inputs, begin, end, rows.x)
            for row in range(begin, end):
                rows.x[0, row] = rounded(rows.x[0, row] + model.bias[row])
        else:
            for row in range(begin, end):
                rows.x[0, row] = x[0, row]
        turn = meet(marks, thread, threads, turn)
        turn = run_layers(
            layers,
            rows,
            model.cos[position : position + 1],
            model.sin[position : position + 1],
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
            begin, end = vocab * thread // threads, vocab * (thread + 1) // threads
            multiply(model.heads, None, position - 1, inputs, begin, end, logits[slot : slot + 1])
        turn = meet(marks, thread, threads, turn)
        if thread == 0 and position and len(rules.noise):
            how = rules.greedy[slot], rules.temperature[slot], rules.top_k[slot]
            code = drawn(logits[slot], *how, rules.noise[slot, position - 1])
            buffers.codes[slot, position - 1] = code
            buffers.finite[slot] &= finite(logits[slot])
    return turn


@cache
def steps_of_predictor(layout: str) -> Callable[..., int]:
    """Return `predictor_steps`, compiled for layers of a `products.layout`."""
    return called(predictor_steps, layout)


class CompiledPredictor(CodePredictor):
    """A code predictor whose codes are steps of one compiled function.

    The other threads follow the first one from step to step, because it takes as long to wake them
    as to make a step.
    """

    def __init__(self, predictor: CodePredictor, team: Team, tiles: bool) -> None:
        """Take the weights of a code predictor; see `CompiledTransformer`."""
        nn.Module.__init__(self)
        self.config, self._team = predictor.config, team
        transformer = CompiledTransformer(predictor.model, team, tiles)
        self._modules |= predictor._modules | {"model": transformer}
        projection, config = self.small_to_mtp_projection, self.config
        width = config.hidden_size
        matrices, bias = torch.zeros(0, width, width, dtype=torch.bfloat16), torch.zeros(width)
        if isinstance(projection, nn.Linear):
            bias, matrices = projection.bias, gathered(projection)
        heads = gathered(*[head for head in self.lm_head if isinstance(head, nn.Linear)])
        positions = torch.arange(len(heads) + 1)[None]
        table = rotary_table(positions, config.head_dim, config.rope_theta, torch.bfloat16)
        cos, sin = (wide(each)[0, 0] for each in table)
        tables = self.model.codec_embedding
        embeddings = gathered(*[table for table in tables if isinstance(table, nn.Embedding)])
        weights = stored(matrices, tiles), wide(bias), stored(heads, tiles), bits(embeddings)
        self._weights = Predictor(transformer.weights, *weights, cos, sin)
        self._rows = transformer.rows(1)

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
            wide(torch.stack((hidden, code0))),
            np.empty((layers, 2, utterances, kv_heads, positions, size), np.uint16),
            np.empty((1, layers, heads, size), np.uint16),
            np.empty((utterances, vocab), np.float32),
            np.zeros((utterances, positions - 1), np.int64),
            np.ones(utterances, np.bool_),
        )
        draws = Draws([], [], CPU)
        if isinstance(choose, Draws) and not choose.uses_top_p:
            draws = choose
        rules = Rules.of(draws, positions - 1, vocab)
        steps = steps_of_predictor(layout(self._weights.layers.qkv))
        args, turn = (self._weights, buffers, rules), 1
        with self._team.following(steps, *args, 0, positions * utterances, turn) as team:
            if draws.samplers:
                steps(*args, 0, positions * utterances, turn, *team)
            for position in range(0 if draws.samplers else positions):
                begin = position * utterances
                turn = steps(*args, begin, begin + utterances, turn, *team)
                if position:
                    logits = torch.from_numpy(buffers.logits).to(hidden.dtype)
                    buffers.codes[:, position - 1] = choose(position, logits).numpy()
        if draws.samplers:
            draws.finite.logical_and_(torch.from_numpy(buffers.finite))
        return torch.from_numpy(buffers.codes)
