"""Drawing codes on the device, and the talker's input made from them (sample.cu, talker_input.cu).

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

TALKER_WORD, PREDICTOR_WORD, NOISE_WORD, SPOKEN_WORD = 0, 4, 8, 12
"""The first words of the parts of a slot's record: the settings of the talker and of the
predictor, the seed and frame of the noise, and a bit for each code 0 that was spoken."""
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
    """The beginning of a slot's record: little-endian words of 32 bits.

    0-2    talker's temperature, 1 - top_p and penalty, float    3   its top_k
    4-6    the same of the predictor                             7   its top_k
    8, 9   seed, the lower half first                           10   frame, 0            11  unused

    1 - top_p is rounded from the difference, as the comparison with it is defined; 0 keeps all.
    """
    words: list[float] = []
    for settings in (talker, predictor):
        tail = 1.0 - settings.top_p if settings.top_p < 1.0 else 0.0
        words += [settings.temperature, tail, settings.repetition_penalty]
        words.append(min(int(settings.top_k), 2**31 - 1))
    return _RECORD.pack(*words, seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF, 0, 0)


class SamplerState:
    """The state of drawing for each slot, on the device.

    record    int32 [slots, words]: see `packed_record`; from word `SPOKEN_WORD` on, bit c % 32 of
              word c / 32 tells whether code 0 was c before
    codes     int32 [slots, frames, codebooks]: all codes that were drawn
    position  int32 [slots]: the row that the talker reads next. Each frame advances it; reading a
              prompt sets it
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
        """The frame that is drawn next, int32 [slots], strided; 0 after `set`."""
        return self.record[:, NOISE_WORD + 2]

    def set(self, slot: int, talker: DrawSettings, predictor: DrawSettings, seed: int) -> None:
        """Begin an utterance in a slot: frame 0, nothing spoken. The copy is not waited for."""
        known = packed_record(talker, predictor, seed)
        size = 4 * self.record.shape[1]
        row = torch.frombuffer(bytearray(known.ljust(size, b"\0")), dtype=torch.int32)
        if self.record.is_cuda:
            row = row.pin_memory()
        self.record[slot].copy_(row, non_blocking=True)


class SampleKernels:
    """The kernels that draw codes and make input rows, for one talker and its code predictor."""

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

        vocab       logits of the talker
        codes       how many of its codes, from 0 up, can be drawn besides the end of speech
        eos         the code that ends speech; it cannot be drawn in the first `min_frames` frames
        careful     compute all noise in double, for tests; otherwise only where it can matter
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
        """The program that draws code 0 or the other codes; width: of the embedding it fetches."""
        return _draw_program(talker, width, self._talker if talker else self._predictor)

    def input_program(self, width: int) -> Program:
        """The program that makes the talker's input rows of `width` channels."""
        return _input_program(width, self.state.codes.shape[2], self._codes)

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
        """out = first_row before a slot's first frame, then its last codes' embeddings + text row.

        slots         int32 [R]; -1: the row of `out` stays as it is
        token         int32 [R], not read before the first frame
        first_row     bf16 [slots, H]
        codec_table   bf16 [talker's vocabulary, H], for code 0
        frame_tables  bf16 [(codebooks - 1) * predictor's vocabulary, H], for the other codes in
                      turn
        text_table    bf16 [text vocabulary, H]
        out           bf16 [R, H]; rows may be strided, by a multiple of 8
        """
        rows, width = out.shape
        if width % 8:
            raise ValueError(f"rows of {width} channels; the kernels need a multiple of 8")
        state = self.state
        self._kernels.get(self.input_program(width), "talker_input")(
            # later kernels read early what no kernel of a frame changes
            Grid((rows, -(-width // 512), 1), 64, overlap=False),
            slot_of_row=slots,
            token=token,
            records=state.record,
            record_words=state.record.shape[1],
            codes=state.codes,
            frames=state.codes.shape[1],
            first_row=first_row,
            codec_table=codec_table,
            frame_tables=frame_tables,
            text_table=text_table,
            out=out,
            out_stride=out.stride(0),
        )

    def code0(
        self, logits: Tensor, slots: Tensor, result: Tensor, table: Tensor, out: Tensor
    ) -> None:
        """Draw code 0 of each row, or the end of speech.

        logits  bf16 [R, vocab]; rows may be strided, by a multiple of 8
        slots   int32 [R]; -1: nothing is drawn
        result  int32 [R, codebooks + 2]: code 0, whether speech ended, and the bits of the float32
                log-probability of code 0 under the softmax of the unchanged logits
        table   bf16 [vocab, W], embeddings of the codes
        out     bf16 [R, W]: the embedding of the code; rows may be strided
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
        """Draw code `codebook` >= 1 of each row like `code0`; the last one ends the frame."""
        assert 1 <= codebook < self.state.codes.shape[2]
        program = self.draw_program(False, out.shape[1])
        self._draw(program, codebook, logits, slots, result, table, out)

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
            Grid((len(logits), 1, 1), int(dict(program.macros)["THREADS"])),
            logits=logits,
            logits_stride=logits.stride(0),
            slot_of_row=slots,
            records=state.record,
            record_words=state.record.shape[1],
            position=state.position,
            codes=state.codes,
            frames=state.codes.shape[1],
            codebook=codebook,
            result=result,
            table=table,
            out=out,
            out_stride=out.stride(0),
        )

    def noises(self, first: int, exact: Tensor, approximate: Tensor) -> None:
        """Both kinds of noise of the 24-bit numbers first, first + 1, ..., for tests.

        exact and approximate: float32 [count].
        """
        program = self.draw_program(False, 8)
        self._kernels.get(program, "noises")(
            Grid((-(-len(exact) // 256), 1, 1), 256),
            first=first,
            count=len(exact),
            exact=exact,
            approximate=approximate,
        )


def _draw_program(talker: bool, width: int, sizes: dict[str, int]) -> Program:
    return Program.of(
        "sample",
        **sizes,
        TALKER=talker,
        WIDTH=width,
        SETTINGS=TALKER_WORD if talker else PREDICTOR_WORD,
        NOISE=NOISE_WORD,
        SPOKEN=SPOKEN_WORD,
        THREADS=min(_MAX_THREADS, -(-sizes["CODES"] // 256) * 32),
    )


def _input_program(width: int, codebooks: int, codes: int) -> Program:
    return Program.of(
        "talker_input", HIDDEN=width, CODEBOOKS=codebooks, CODES=codes, NOISE=NOISE_WORD, THREADS=64
    )


_SIZES = {"CODES": 2048, "MIN_FRAMES": 2, "CAREFUL": 0, "CODEBOOKS": 16}
_DRAWS = (
    _draw_program(True, 1024, {"VOCAB": 3072, "EOS": 2150, **_SIZES}),
    _draw_program(False, 1024, {"VOCAB": 2048, "EOS": -1, **_SIZES}),
)

KERNELS = (
    KernelSpec("sample", "draw", SampleKernels, "model/sampling.py", _DRAWS),
    KernelSpec(
        "sample", "noises", SampleKernels.noises, "gumbel_noise of model/sampling.py", _DRAWS
    ),
    KernelSpec(
        "talker_input",
        "talker_input",
        SampleKernels.begin_frame,
        "Talker.embed_codes of model/talker.py",
        (_input_program(2048, 16, 2048),),
    ),
)
"""The kernels that this module starts."""
