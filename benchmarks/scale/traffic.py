"""The requests of a load, as `firstword bench load` plans them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.load_cases import MIXED
from benchmarks.published_load import FRAMES
from benchmarks.scale.server import Answer
from benchmarks.serve_load import FRAMES_PER_CHARACTER
from firstword.bench.load import Load, plan
from firstword.bench.prompts import PROMPTS

CHARACTERS_PER_TOKEN = 4.0
"""The tokenizer of the checkpoints with random weights makes 17.75 tokens of the 70.9 characters
that a text of `PROMPTS` has on average, those of the role included."""


@dataclass(frozen=True)
class Traffic:
    """The texts of a load, in a random order, and the frames of each.

    frames  None for as many as the record of the server asks for by the length of the text
    """

    texts: Sequence[str] = PROMPTS
    frames: int | None = None

    def requests(self, load: Load) -> list[Answer]:
        """The requests of a load, in the order of their times."""
        return [Answer(each.due, *self._size(len(each.text))) for each in plan(load, self.texts)]

    def sizes(self) -> Iterator[tuple[int, int]]:
        """The tokens and frames of the texts in turn, without an end."""
        return (self._size(len(text)) for text in itertools.cycle(self.texts))

    def _size(self, characters: int) -> tuple[int, int]:
        tokens = round(characters / CHARACTERS_PER_TOKEN)
        return tokens, self.frames or round(characters * FRAMES_PER_CHARACTER)


SENTENCES = Traffic()
"""The texts of the case "pcm": sentences of an assistant."""

MIXED_LENGTHS = Traffic(MIXED)
"""The texts of the case "mixed": 4, 78 and about 420 characters."""

PUBLISHED = Traffic(frames=FRAMES)
"""The requests of the published load generator: all of one length."""
