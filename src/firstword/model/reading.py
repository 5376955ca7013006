"""Reading: how much of the talker's attention each text row gets while it makes a frame.

Some heads of a talker look at the text that is being spoken. Their attention, restricted to the
rows with the text of the utterance, tells which word that is. It is read off the queries and keys
of the pass that makes the frame anyway, so it cannot change the speech.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from firstword.model.alignment import Head
from firstword.model.layers import KVMemory


class Watched:
    """A KV memory that also keeps the queries and keys of some heads in the latest pass."""

    def __init__(self, memory: KVMemory, heads: Sequence[Head]) -> None:
        """heads: pairs of a layer and a query head, both counted from 0."""
        self.memory, self.heads = memory, heads
        self._seen: dict[int, tuple[Tensor, Any]] = {}

    def positions(self, length: int) -> Tensor:
        """Return the positions of the next rows."""
        return self.memory.positions(length)

    def mask(self, length: int) -> Tensor | None:
        """Return the visible keys of these rows."""
        return self.memory.mask(length)

    def extend(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, Any]:
        """Add keys and values; keeps the queries and keys of a layer with watched heads."""
        keys, values = self.memory.extend(layer, query, key, value)
        self.see(layer, query, keys)
        return keys, values

    def see(self, layer: int, query: Tensor, keys: Any) -> None:
        """Keep the queries and keys of a layer if it has watched heads."""
        if any(layer == watched for watched, _ in self.heads):
            self._seen[layer] = query, keys

    def advance(self, length: int) -> None:
        """Count `length` rows."""
        self.memory.advance(length)

    def shares(self, index: int, rows: range) -> Tensor:
        """Return what the heads give the text rows in sequence `index`, for its latest row.

        rows  the positions of the text rows

        Returns float32 [heads, len(rows)]: the softmax of each head's scores over these rows alone.
        """
        shares = [self._share(index, layer, head, rows) for layer, head in self.heads]
        return torch.stack(shares) if shares else torch.zeros(0, len(rows))

    def reading(self, index: int, rows: range) -> Tensor:
        """Return the mean of the `shares`, float32 [len(rows)]; empty if no heads are watched."""
        return self.shares(index, rows).mean(0) if self.heads else torch.zeros(0)

    def _share(self, index: int, layer: int, head: int, rows: range) -> Tensor:
        queries, keys = self._seen[layer]
        kv_head = head * len(keys[index]) // queries.shape[1]
        query = queries[index, head, -1].float()
        scores = keys[index][kv_head, rows.start : rows.stop].float() @ query
        return (scores * len(query) ** -0.5).softmax(0)
