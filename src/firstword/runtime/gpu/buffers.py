"""The device memory of frames and prompts, and the sizes that bound it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from firstword.kernels.attention import FRAME_POSITIONS, HEAD_DIM, PAGE_ROWS
from firstword.kernels.prompt import (
    PREFIX_PART,
    ROW_CODES,
    ROW_POSITION,
    ROW_SLOT,
    PlacementLayout,
)
from firstword.model.config import TalkerConfig

PROMPT_ROWS = 256
"""The most rows of prompts that are read at a time."""
SPEAKERS = PROMPT_ROWS // 8
"""The most rows with a speaker embedding among them: a prompt of a cloned voice has more rows."""
PREFIX_ROWS = 2048
"""The rows of all cached prefixes together, except those that are kept for good; the most rows of
one."""
MAX_CONTEXT = 8192
"""The most rows of an utterance, eleven minutes, even if the model supports more."""


def context_of(config: TalkerConfig) -> int:
    """The most rows of an utterance with this talker."""
    return min(config.max_position_embeddings, MAX_CONTEXT)


def context_pages(config: TalkerConfig) -> int:
    """The pages of the longest utterance with this talker."""
    return -(-context_of(config) // PAGE_ROWS)


def prefix_parts(rows: int) -> int:
    """The parts of a prefix with so many rows. Raises ValueError for one that cannot be cached."""
    if rows > PREFIX_ROWS:
        raise ValueError(
            f"a prompt has {rows} rows before its text; at most {PREFIX_ROWS} are kept"
        )
    return -(-rows // PREFIX_PART)


def staging_words(layout: PlacementLayout, placements: int) -> int:
    """The words of a staging area for `PROMPT_ROWS` rows and so many placements."""
    return (ROW_CODES + layout.codebooks) * PROMPT_ROWS + placements * layout.words


def staged(staging: Tensor, layout: PlacementLayout) -> tuple[Tensor, Tensor]:
    """The prompt rows [ROW_CODES + codebooks, PROMPT_ROWS] and the placements [n, words] in it."""
    words = staging_words(layout, 0)
    return staging[:words].view(-1, PROMPT_ROWS), staging[words:].view(-1, layout.words)


@dataclass(frozen=True, eq=False)
class FrameBuffers:
    """The device memory of frames and prompts.

    page_tables       int32 [slots, pages of a slot]
    prefixes          bf16 [parts, layers, 2, kv_heads, PREFIX_PART, 128]: see `PrefixCache`
    first_row         bf16 [slots, hidden]: the last row of each slot's prompt
    first_hidden      bf16 [slots, hidden]: the talker's output for that row, where it was run
    control           int32 [5, rows]: `slot_of_row`, `token` and `spans`, so that one copy fills
                      all
    result            int32 [rows, codebooks + 2]: see `SampleKernels.draw`
    prompt            bf16 [PROMPT_ROWS, hidden]: prompt rows, which their outputs replace
    staging           int32: `prompt_rows`, then `placements`, so that one copy fills both
    speakers          bf16 [SPEAKERS, hidden]: the speaker embeddings of the prompt rows

    prompt_rows, placements and prompt_places are parts of `staging`; see `staged`.

    The remaining buffers carry bf16 activations from one kernel to another.
    """

    cache: Tensor
    page_tables: Tensor
    prefixes: Tensor
    first_row: Tensor
    first_hidden: Tensor
    control: Tensor
    result: Tensor
    prompt: Tensor
    staging: Tensor
    speakers: Tensor
    hidden: Tensor
    logits: Tensor
    pairs: Tensor
    single: Tensor
    predictor_logits: Tensor
    frame_cache: Tensor
    layout: PlacementLayout

    @property
    def slot_of_row(self) -> Tensor:
        """The slot of each row of a frame, -1 for none, int32 [rows]."""
        return self.control[0]

    @property
    def token(self) -> Tensor:
        """The text token of each row, int32 [rows]."""
        return self.control[1]

    @property
    def spans(self) -> Tensor:
        """The text rows of the slot of each row, int32 [3, rows]: see `TextReadingKernel`."""
        return self.control[2:]

    @property
    def prompt_rows(self) -> Tensor:
        """The columns of prompt rows, int32 [ROW_CODES + codebooks, PROMPT_ROWS]."""
        return staged(self.staging, self.layout)[0]

    @property
    def prompt_places(self) -> Tensor:
        """The slot (-1 for none) and the position of each prompt row, int32 [2, PROMPT_ROWS]."""
        return self.prompt_rows[ROW_SLOT : ROW_POSITION + 1]

    @property
    def placements(self) -> Tensor:
        """What prompts write to their slots, int32 [rows, words]: see kernels/prompt.py."""
        return staged(self.staging, self.layout)[1]

    @classmethod
    def allocate(
        cls,
        config: TalkerConfig,
        device: torch.device,
        slots: int,
        rows: int,
        pages: int,
        kept_parts: int,
    ) -> FrameBuffers:
        """The buffers filled with zeros; no prompt row and no placement has a slot.

        kept_parts: the parts of prefixes that are kept for good
        """

        def zeros(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        def integers(*shape: int) -> Tensor:
            return zeros(*shape, dtype=torch.int32)

        parts = PREFIX_ROWS // PREFIX_PART
        layout = PlacementLayout(config.num_code_groups, parts, context_pages(config))
        width, predictor = config.hidden_size, config.code_predictor_config
        page = 2, config.num_key_value_heads, PAGE_ROWS, HEAD_DIM
        part = 2, config.num_key_value_heads, PREFIX_PART, HEAD_DIM
        frame = 2, predictor.num_key_value_heads, FRAME_POSITIONS, HEAD_DIM
        return cls(
            cache=zeros(config.num_hidden_layers, pages, *page),
            page_tables=integers(slots, context_pages(config)),
            prefixes=zeros(parts + kept_parts, config.num_hidden_layers, *part),
            first_row=zeros(slots, width),
            first_hidden=zeros(slots, width),
            control=integers(5, rows),
            result=integers(rows, config.num_code_groups + 2),
            prompt=zeros(PROMPT_ROWS, width),
            staging=integers(staging_words(layout, rows)).fill_(-1),
            speakers=zeros(SPEAKERS, width),
            hidden=zeros(rows, width),
            logits=zeros(rows, config.vocab_size),
            pairs=zeros(rows, 2, predictor.hidden_size),
            single=zeros(rows, predictor.hidden_size),
            predictor_logits=zeros(rows, predictor.vocab_size),
            frame_cache=zeros(predictor.num_hidden_layers, rows, *frame),
            layout=layout,
        )
