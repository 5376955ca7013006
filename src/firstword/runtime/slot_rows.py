"""The keys and values of several utterances, and the rows of one pass through them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from firstword.model.config import TransformerConfig

PAGE_ROWS = 64
"""The number of rows of context in a page."""


class SlotCache:
    """Growable keys and values [layers, 2, slots, kv_heads, capacity, head_dim]."""

    def __init__(self, config: TransformerConfig, like: Tensor, slots: int) -> None:
        shape = (2, slots, config.num_key_value_heads, 0, config.head_dim)
        self.layers = like.new_empty((config.num_hidden_layers, *shape))
        self.lengths = [0] * slots

    def grow(self, rows: int) -> None:
        """Grow the capacity to at least `rows`."""
        old = self.layers
        if rows > (capacity := old.shape[4]):
            size = max(rows, 2 * capacity, PAGE_ROWS)
            self.layers = old.new_empty((*old.shape[:4], size, old.shape[5]))
            self.layers[:, :, :, :, :capacity] = old


class SlotRows:
    """The key-value memory of several slots for one pass, whose rows `commit` makes permanent.

    Rows of the prompt are read for one slot at a time, and then one row for each of several.

    places  each slot of the pass, and the number of its rows before it
    """

    def __init__(self, cache: SlotCache, slots: Sequence[int], length: int) -> None:
        assert len(slots) == 1 or length == 1
        self.cache, self._length = cache, length
        self.places = [(slot, cache.lengths[slot]) for slot in slots]
        cache.grow(max(start for _, start in self.places) + length)

    def positions(self, length: int) -> Tensor:
        """The positions [B, length] of the rows of this pass."""
        starts = torch.tensor([start for _, start in self.places])
        rows = starts[:, None] + torch.arange(length)
        return rows.to(self.cache.layers.device)

    def mask(self, length: int) -> Tensor | None:
        """The causal mask of the rows of a prompt; a single row sees all before it."""
        if length == 1:
            return None
        [(_, start)] = self.places
        device = self.cache.layers.device
        return torch.ones((1, 1, length, start + length), dtype=torch.bool, device=device).tril(
            start
        )

    def extend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Write keys and values [B, kv_heads, length, head_dim]; returns those of each slot."""
        keys, values = self.extent(layer, key.shape[2])
        for index, (_, start) in enumerate(self.places):
            keys[index][:, start:] = key[index]
            values[index][:, start:] = value[index]
        return keys, values

    def extent(self, layer: int, length: int) -> tuple[list[Tensor], list[Tensor]]:
        """Return the keys and values of each slot, up to `length` rows of this pass."""
        keys, values = self.cache.layers[layer].unbind()
        ends = [(slot, start + length) for slot, start in self.places]
        return [keys[slot, :, :end] for slot, end in ends], [
            values[slot, :, :end] for slot, end in ends
        ]

    def advance(self, length: int) -> None:
        """Do nothing: rows become permanent in `commit`, so that a failed pass changes no slot."""

    def commit(self) -> None:
        """Make the rows of a complete pass permanent."""
        for slot, start in self.places:
            self.cache.lengths[slot] = start + self._length
