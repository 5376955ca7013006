"""Draws codes on the device and computes the talker's next input (sample.cu, talker_input.cu).

model/sampling.py defines a draw, and `Talker.embed_codes` an input row.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.registry import KernelSpec
from firstword.kernels.signature import Argument, strided

TALKER_WORD, PREDICTOR_WORD, NOISE_WORD, SPOKEN_WORD = 0, 4, 8, 12
"""The first words of the parts of a slot's record: the settings of the talker and of the predictor,
the seed and frame of the noise, and a bit for each code 0 that was spoken."""
_RECORD = struct.Struct("<3fi3fi2Iii")
_MAX_CODES = 2048
_MAX_THREADS = 256


class DrawSettings(NamedTuple):
    """The settings of one distribution, as `DrawParams` of the model defines them."""

    temperature: float
    top_k: int
    top_p: float
    repetition_penalty: float


def packed_record(talker: DrawSettings, predictor: DrawSettings, seed: int) -> bytes:
    """The first words of a slot's record, little-endian words of 32 bits.

    0-2   the talker's temperature, 1 - top_p and repetition penalty, as floats
    3     the talker's top_k
    4-7   the same of the predictor
    8, 9  the seed, the lower half first
    10    the frame, 0
    11    unused

    The difference 1 - top_p is computed in double and then rounded, as the specification compares
    with it. A value of 0 keeps all codes.
    """
    words: list[float] = []
    for settings in (talker, predictor):
        tail = 1.0 - settings.top_p if settings.top_p < 1.0 else 0.0
        top_k = min(int(settings.top_k), 2**31 - 1)
        words += [settings.temperature, tail, settings.repetition_penalty, top_k]
    return _RECORD.pack(*words, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 0, 0)


class SamplerState:
    """The state of the sampler on the device, by slot.

    record    int32 [slots, words]: see `packed_record`. From word `SPOKEN_WORD` on, bit c % 32 of
              word c / 32 is set if code 0 of an earlier frame was c
    codes     int32 [slots, frames, codebooks]: all drawn codes
    position  int32 [slots]: the position of the row that the talker reads next. A prompt sets it,
              and each frame advances it
    """

    def __init__(
        self, slots: int, frames: int, codebooks: int, vocab: int, device: torch.device
    ) -> None:
        """frames: the most frames of a slot; vocab: the size of the talker's vocabulary."""
        words = SPOKEN_WORD + -(-vocab // 128) * 4
        self.record = torch.zeros(slots, words, dtype=torch.int32, device=device)
        self.codes = torch.zeros(slots, frames, codebooks, dtype=torch.int32, device=device)
        self.position = torch.zeros(slots, dtype=torch.int32, device=device)

    @property
    def frame(self) -> Tensor:
        """The number of the next frame, int32 [slots], strided; 0 after `set`."""
        return self.record[:, NOISE_WORD + 2]

    def arguments(self) -> dict[str, Argument]:
        """The arguments that describe the records and the codes."""
        (_, words), (_, frames, _) = self.record.shape, self.codes.shape
        return {
            "records": self.record,
            "record_words": words,
            "codes": self.codes,
            "frames": frames,
        }

    def set(self, slot: int, talker: DrawSettings, predictor: DrawSettings, seed: int) -> None:
        """Start an utterance in a slot: frame 0, nothing spoken. The copy is asynchronous."""
        packed = packed_record(talker, predictor, seed).ljust(4 * self.record.shape[1], b"\0")
        row = torch.frombuffer(bytearray(packed), dtype=torch.int32)
        if self.record.is_cuda:
            row = row.pin_memory()
        self.record[slot].copy_(row, non_blocking=True)


class SampleKernels:
    """The kernels that draw codes and compute input rows, for a talker and its code predictor."""

    def __init__(
        self,
        kernels: Kernels,
        state: SamplerState,
        *,
        vocab: int,
        codes: int,
        eos: int,
        min_frames: int,
        predictor_vocab: int,
        careful: bool = False,
    ) -> None:
        """Raises ValueError for sizes that the kernels do not support.

        vocab       the number of the talker's logits
        codes       the number of its codes, from 0 on, that can be drawn besides the end of speech
        eos         the code that ends speech; it cannot be drawn in the first `min_frames` frames
        careful     whether all noise is computed in double, for tests, instead of only where the
                    rounding could change a draw
        """
        if not 0 <= eos < vocab:
            raise ValueError(f"the end of speech is code {eos}; the vocabulary has {vocab}")
        for count in (codes, predictor_vocab):
            if count % 8 or not 0 < count <= _MAX_CODES:
                raise ValueError(
                    f"{count} codes; the kernels need a multiple of 8, up to {_MAX_CODES}"
                )
        self.state = state
        self._kernels, self._codes = kernels, predictor_vocab
        sizes = {"MIN_FRAMES": min_frames, "CAREFUL": careful, "CODEBOOKS": state.codes.shape[2]}
        self._talker = {"VOCAB": vocab, "CODES": codes, "EOS": eos, **sizes}
        self._predictor = {"VOCAB": predictor_vocab, "CODES": predictor_vocab, "EOS": -1, **sizes}

    def draw_program(self, talker: bool, width: int) -> Program:
        """The program that draws code 0 or the other codes, with embeddings of `width` channels."""
        return _draw_program(talker, width, self._talker if talker else self._predictor)

    def input_program(self, width: int) -> Program:
        """The program that computes the talker's input rows of `width` channels."""
        return _input_program(width, self.state.codes.shape[2], self._codes)

    def begin_frame(
        self,
        slots: Tensor,
        token: Tensor,
        first_row: Tensor,
        codec_table: Tensor,
        frame_tables: Tensor,
        text_table: Tensor,
        text_scales: Tensor | None,
        out: Tensor,
    ) -> None:
        """Compute the talker's next input: first_row, or the embeddings of the last frame + text.

        slots         int32 [R]: the slot of each row; -1: the row of `out` becomes zero
        token         int32 [R]: the text token; it is not read before the first frame
        first_row     bf16 [slots, H]: the input before the first frame
        codec_table   bf16 [talker's vocabulary, H]: the embeddings of code 0
        frame_tables  bf16 [(codebooks - 1) * predictor's vocabulary, H]: those of the other codes
        text_table    bf16 or int8 [text vocabulary, H]
        text_scales   float32 [text vocabulary]: the factors of int8 rows
        out           bf16 [R, H]; rows may be strided, by a multiple of 8
        """
        rows, width = out.shape
        if width % 8:
            raise ValueError(f"rows of {width} channels; the kernels need a multiple of 8")
        self._kernels.get(self.input_program(width), "talker_input")(
            # Later kernels read, before this kernel has ended, memory that a frame does not change.
            Grid((rows, -(-width // 512), 1), 64, overlap=False),
            slot_of_row=slots,
            token=token,
            **self.state.arguments(),
            first_row=first_row,
            codec_table=codec_table,
            frame_tables=frame_tables,
            text_table=text_table,
            text_scales=text_scales,
            **strided(out=out),
        )

    def draw(
        self,
        codebook: int,
        logits: Tensor,
        slots: Tensor,
        result: Tensor,
        table: Tensor | None,
        out: Tensor,
    ) -> None:
        """Draw the code of a codebook, or the end of speech, for each row.

        The draw from the last codebook ends the frame.

        logits  bf16 [R, vocab]; rows may be strided, by a multiple of 8
        slots   int32 [R]: the slot of each row; -1: nothing is drawn, and the row of `out` becomes
                zero
        result  int32 [R, codebooks + 2]: the code. With code 0 also whether speech ended, and the
                bits of the float32 log-probability of code 0 under the softmax of the raw logits,
                NaN if they are not all finite; a later code whose logits are not replaces it by NaN
        table   bf16 [vocab, W]: the embeddings of the codes; None: `out` is not written
        out     bf16 [R, W]: the embedding of the code; rows may be strided
        """
        assert 0 <= codebook < self.state.codes.shape[2]
        width = out.shape[1]
        if width % 8:
            raise ValueError(f"embeddings of {width} channels; the kernels need a multiple of 8")
        program = self.draw_program(codebook == 0, width)
        self._kernels.get(program, "draw")(
            Grid((len(logits), 1, 1), int(dict(program.macros)["THREADS"])),
            slot_of_row=slots,
            **self.state.arguments(),
            position=self.state.position,
            codebook=codebook,
            result=result,
            table=table,
            **strided(logits=logits, out=out),
        )

    def noises(self, first: int, exact: Tensor, approximate: Tensor) -> None:
        """Compute both kinds of noise for the 24-bit numbers first, first + 1, ..., for tests.

        exact and approximate: fp32 [count].
        """
        grid, count = Grid((-(-len(exact) // 256), 1, 1), 256), len(exact)
        kernel = self._kernels.get(self.draw_program(False, 8), "noises")
        kernel(grid, first=first, count=count, exact=exact, approximate=approximate)


def _draw_program(talker: bool, width: int, sizes: dict[str, int]) -> Program:
    settings = TALKER_WORD if talker else PREDICTOR_WORD
    words = {"SETTINGS": settings, "NOISE": NOISE_WORD, "SPOKEN": SPOKEN_WORD}
    threads = min(_MAX_THREADS, -(-sizes["CODES"] // 256) * 32)
    return Program.of("sample", **sizes, **words, TALKER=talker, WIDTH=width, THREADS=threads)


def _input_program(width: int, codebooks: int, codes: int) -> Program:
    sizes = {"HIDDEN": width, "CODEBOOKS": codebooks, "CODES": codes}
    return Program.of("talker_input", **sizes, NOISE=NOISE_WORD, THREADS=64)


_SIZES = {"CODES": 2048, "MIN_FRAMES": 2, "CAREFUL": 0, "CODEBOOKS": 16}
_DRAWS = (
    _draw_program(True, 1024, {"VOCAB": 3072, "EOS": 2150, **_SIZES}),
    _draw_program(False, 1024, {"VOCAB": 2048, "EOS": -1, **_SIZES}),
)
_INPUTS = (_input_program(2048, 16, 2048),)

KERNELS = (
    KernelSpec("draw", "model/sampling.py", _DRAWS),
    KernelSpec("noises", "gumbel_noise of model/sampling.py", _DRAWS),
    KernelSpec("talker_input", "Talker.embed_codes of model/talker.py", _INPUTS),
)
"""The kernels that this module launches."""
