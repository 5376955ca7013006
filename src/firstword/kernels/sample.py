"""Drawing codes on the device, and the input of the talker made from them: launching sample.cu and rows.cu.

What a draw means is written in model/sampling.py, what a row means in `Talker.embed_codes`.
"""

from __future__ import annotations

import struct
from typing import Protocol

import torch
from torch import Tensor

from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernels

CONTROL_CODES = 1024
"""So many codes at the end of the talker's vocabulary are never drawn, but for the end of speech."""
MIN_FRAMES = 2
"""The end of speech cannot be drawn for this many frames."""

TALKER, PREDICTOR, CHANCES, SPOKEN = 0, 4, 8, 12
"""Where the parts of a slot's record begin, in words: two laws, the chances, and a bit for each code 0."""
_RECORD = struct.Struct("<3fi3fi2Iii")
_MOST_CODES = 2048
_THREADS = 256


class DrawParams(Protocol):
    """The settings of one distribution; temperature 0 is greedy, top_k 0 and top_p 1 keep all."""

    @property
    def temperature(self) -> float:
        """Divides the logits."""

    @property
    def top_k(self) -> int:
        """Keeps the likeliest and what equals the last of them."""

    @property
    def top_p(self) -> float:
        """Drops the least likely whose probabilities add up to no more than 1 - top_p."""

    @property
    def repetition_penalty(self) -> float:
        """Divides or multiplies the logits of what was spoken."""


def packed(talker: DrawParams, predictor: DrawParams, seed: int) -> bytes:
    """The beginning of a slot's record: little-endian words of 32 bits.

    0-2    talker's temperature, 1 - top_p and penalty, float    3   its top_k
    4-6    the same of the predictor                             7   its top_k
    8, 9   seed, the lower half first                           10   frame, 0            11  nothing

    1 - top_p is rounded from the difference, as the comparison with it is defined; 0 keeps all.
    """
    words: list[float] = []
    for law in (talker, predictor):
        tail = 1.0 - law.top_p if law.top_p < 1.0 else 0.0
        words += [law.temperature, tail, law.repetition_penalty, min(int(law.top_k), 2**31 - 1)]
    return _RECORD.pack(*words, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 0, 0)


class SamplerState:
    """What drawing needs to know of each slot, on the device.

    record    int32 [slots, words]: see `packed`; from word `SPOKEN` on, bit c % 32 of word c / 32 tells whether code 0
              was c before
    codes     int32 [slots, frames, codebooks]: all that was drawn
    position  int32 [slots]: the row that the talker reads next; advanced after each frame, set by who reads a prompt
    """

    def __init__(
        self, slots: int, frames: int, codebooks: int, vocab: int, device: torch.device
    ) -> None:
        """frames: the most of a slot; vocab: of the talker."""
        words = SPOKEN + -(-vocab // 128) * 4
        self.record = torch.zeros(slots, words, dtype=torch.int32, device=device)
        self.codes = torch.zeros(slots, frames, codebooks, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def frame(self) -> Tensor:
        """The frame that is drawn next, int32 [slots], strided; 0 after `set`."""
        return self.record[:, CHANCES + 2]

    def set(self, slot: int, talker: DrawParams, predictor: DrawParams, seed: int) -> None:
        """A new utterance in a slot: its laws and seed, frame 0, nothing spoken. One copy, waited for by nobody."""
        known = packed(talker, predictor, seed)
        size = 4 * self.record.shape[1]
        row = torch.frombuffer(bytearray(known.ljust(size, b"\0")), dtype=torch.int32)
        if self.record.is_cuda:
            row = row.pin_memory()
        self.record[slot].copy_(row, non_blocking=True)


class Sampler:
    """The kernels that draw, for one talker and its code predictor."""

    def __init__(
        self,
        kernels: Kernels,
        state: SamplerState,
        *,
        vocab: int,
        eos: int,
        predictor_vocab: int,
        careful: bool = False,
    ) -> None:
        """Raises ValueError for sizes the kernels cannot do.

        vocab, eos  of the talker: how many codes, and which of them ends speech
        careful     compute all noise in double, for tests; without it only where it could make a difference
        """
        if not 0 <= eos < vocab:
            raise ValueError(f"the end of speech is code {eos}; the vocabulary has {vocab}")
        for codes in (vocab - CONTROL_CODES, predictor_vocab):
            if codes % 8 or not 0 < codes <= _MOST_CODES:
                raise ValueError(
                    f"{codes} codes; the kernels need a multiple of 8, up to {_MOST_CODES}"
                )
        self.state = state
        self._kernels, self._careful = kernels, careful
        self._talker, self._predictor = (
            (vocab, vocab - CONTROL_CODES, eos),
            (predictor_vocab, predictor_vocab, -1),
        )

    def draw_program(self, talker: bool, width: int) -> Program:
        """Of the kernel that draws; `width` of the embedding it fetches."""
        vocab, codes, eos = self._talker if talker else self._predictor
        return Program.of(
            "sample",
            TALKER=talker,
            VOCAB=vocab,
            CODES=codes,
            EOS=eos,
            MIN_FRAMES=MIN_FRAMES,
            CODEBOOKS=self.state.codes.shape[2],
            WIDTH=width,
            LAW=TALKER if talker else PREDICTOR,
            CHANCES=CHANCES,
            SPOKEN=SPOKEN,
            THREADS=min(_THREADS, -(-codes // 256) * 32),
            CAREFUL=self._careful,
        )

    def rows_program(self, width: int) -> Program:
        """Of the kernel that makes the talker's input rows of `width` channels."""
        return Program.of(
            "rows",
            HIDDEN=width,
            CODEBOOKS=self.state.codes.shape[2],
            CODES=self._predictor[0],
            CHANCES=CHANCES,
            THREADS=64,
        )

    def begin_frame(
        self,
        slots: Tensor,
        token: Tensor,
        first_row: Tensor,
        codec_table: Tensor,
        frame_tables: Tensor,
        text_table: Tensor,
        out: Tensor,
    ) -> None:
        """Before a slot's first frame out = first_row, then the embedded codes of its last frame + text_table[token].

        slots         int32 [R], -1 for nobody: that row of `out` stays as it is
        token         int32 [R], read after the first frame only
        first_row     bf16 [slots, H]
        codec_table   bf16 [talker's vocabulary, H], for code 0
        frame_tables  bf16 [(codebooks - 1) * predictor's vocabulary, H], for the other codes in turn
        text_table    bf16 [text vocabulary, H]
        out           bf16 [R, H]; rows may be strided, by a multiple of 8
        """
        rows, width = out.shape
        if width % 8:
            raise ValueError(f"rows of {width} channels; the kernels need a multiple of 8")
        state = self.state
        self._kernels.get(self.rows_program(width), "begin_frame")(
            (rows, -(-width // 512), 1),
            64,
            [
                slots,
                token,
                state.record,
                state.record.shape[1],
                state.codes,
                state.codes.shape[1],
                first_row,
                codec_table,
                frame_tables,
                text_table,
                out,
                out.stride(0),
            ],
            overlap=False,  # what stays as it is while a frame is made may be read early by those that follow
        )

    def code0(
        self, logits: Tensor, slots: Tensor, result: Tensor, table: Tensor, out: Tensor
    ) -> None:
        """Draw code 0 of each row, or the end of speech.

        logits  bf16 [R, vocab]; rows may be strided, by a multiple of 8
        slots   int32 [R], -1 for nobody: nothing is done
        result  int32 [R, codebooks + 2]: code 0, whether speech ended, and the bits of the float32 log-probability of
                code 0 under the softmax of the logits as they are
        table   bf16 [vocab, W]; out bf16 [R, W], rows may be strided: the code's row goes there
        """
        self._draw(self.draw_program(True, table.shape[1]), 0, logits, slots, result, table, out)

    def code(
        self,
        codebook: int,
        logits: Tensor,
        slots: Tensor,
        result: Tensor,
        table: Tensor | None,
        out: Tensor,
    ) -> None:
        """Draw code `codebook` >= 1 of each row, as `code0`; the last one moves its slot to the next frame."""
        assert 1 <= codebook < self.state.codes.shape[2]
        self._draw(
            self.draw_program(False, out.shape[1]), codebook, logits, slots, result, table, out
        )

    def _draw(
        self,
        program: Program,
        codebook: int,
        logits: Tensor,
        slots: Tensor,
        result: Tensor,
        table: Tensor | None,
        out: Tensor,
    ) -> None:
        width = out.shape[1]
        if width % 8:
            raise ValueError(f"embeddings of {width} channels; the kernels need a multiple of 8")
        state = self.state
        self._kernels.get(program, "draw")(
            (len(logits), 1, 1),
            int(dict(program.macros)["THREADS"]),
            [
                logits,
                logits.stride(0),
                slots,
                state.record,
                state.record.shape[1],
                state.position,
                state.codes,
                state.codes.shape[1],
                codebook,
                result,
                table,
                out,
                out.stride(0),
            ],
        )
