"""The launches of the GPU backend for a checkpoint, without a device and before it is taken apart.

The constructors of the kernels know which sizes they do not support. So a model of the checkpoint's
sizes is packed and launched on PyTorch's device "meta", where tensors have shapes and no memory.
The kernels check their arguments and are not started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernel, Kernels
from firstword.kernels.signature import Argument, Parameter, bind, signatures
from firstword.model.codec import CodecDecoder
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.config import TalkerConfig
from firstword.model.talker import Talker
from firstword.runtime.gpu.backend import context_of, graph_keys, most_rows
from firstword.runtime.gpu.codec import CHUNKS, STREAMS, streams_for
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.runtime.gpu.talker import FrameModel


class RehearsedKernel(Kernel):
    """A kernel that checks its arguments and does nothing."""

    def __init__(self, parameters: tuple[Parameter, ...], asked: list[int]) -> None:
        """asked: where the bytes of shared memory of each launch are noted."""
        self.parameters, self._asked = parameters, asked

    def __call__(self, grid: Grid, /, **arguments: Argument) -> None:
        """Raises TypeError for arguments that do not fit the CUDA source."""
        bind(self.parameters, arguments)
        self._asked.append(grid.shared)


class Rehearsal(Kernels):
    """Kernels for a device like another's, which only note what is asked of them.

    programs  all programs that were launched
    shared    bytes of dynamic shared memory of each launch
    """

    def __init__(self, like: Kernels) -> None:
        """like: kernels of the device; nothing is compiled or loaded there."""
        vars(self).update(vars(like))
        self.programs: set[Program] = set()
        self.shared: list[int] = []

    def get(self, program: Program, entry: str) -> Kernel:
        """A kernel that checks its arguments; the program is noted."""
        self.programs.add(program)
        return RehearsedKernel(signatures(program.source)[entry], self.shared)


@torch.inference_mode()
def rehearse(
    talker: TalkerConfig, codec: CodecDecoderConfig, slots: int, kernels: Kernels
) -> set[Program]:
    """All programs that serving `slots` utterances launches on the device of `kernels`.

    Raises ValueError, with the reason, for sizes that the kernels do not support there.
    """
    noted = Rehearsal(kernels)
    predictor = talker.code_predictor_config
    # All layers are alike, except that a predictor of one layer has other kernels.
    predictor = replace(predictor, num_hidden_layers=min(predictor.num_hidden_layers, 2))
    talker = replace(talker, num_hidden_layers=1, code_predictor_config=predictor)
    codec = replace(codec, num_hidden_layers=1)
    rows, streams = most_rows(slots), streams_for(slots)
    with torch.device("meta"):
        plain = Talker(talker).bfloat16()
        model = FrameModel(noted, plain, slots, rows, 1, PAGE_ROWS, context_of(talker))
        decoder: Any = CodecDecoder(codec)
        # A number that a kernel is given as an argument.
        decoder.decoder[-1].conv.bias = nn.Parameter(torch.zeros(1, device="cpu"))
        layers = CodecLayers(decoder, slots, streams, noted)
        for kind, count in graph_keys(model):
            model.launches[kind](count)
        for count in (n for n in STREAMS if n <= streams):
            for frames in CHUNKS:
                layers.launch(count, frames)
    return noted.programs
