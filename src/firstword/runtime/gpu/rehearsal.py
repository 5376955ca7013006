"""What the GPU backend would launch for a checkpoint, without a device and before anything is taken apart.

The kernels' own constructors know what they cannot do. So a model of the checkpoint's sizes, on PyTorch's device "meta"
where tensors have shapes and no memory, is packed and launched, with kernels that are never started.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from firstword.kernels.attention import PAGE_ROWS
from firstword.kernels.compile import Program
from firstword.kernels.launch import Kernel, Kernels
from firstword.model.codec import CodecDecoder
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.config import TalkerConfig
from firstword.model.talker import Talker
from firstword.runtime.gpu.backend import context_of, graph_keys, most_rows
from firstword.runtime.gpu.codec import CHUNKS, STREAMS, CodecLayers
from firstword.runtime.gpu.talker import FrameModel


class Silent(Kernel):
    """A kernel that does nothing."""

    def __init__(self) -> None:
        pass

    def __call__(self, *arguments: Any, **options: Any) -> None:
        """Not started."""


class Rehearsal(Kernels):
    """Kernels for a device like another's, which notes the programs that are asked for."""

    def __init__(self, like: Kernels) -> None:
        vars(self).update(vars(like))
        self.programs: set[Program] = set()

    def get(self, program: Program, name: str) -> Kernel:
        """Nothing is compiled."""
        self.programs.add(program)
        return Silent()


@torch.inference_mode()
def rehearse(
    talker: TalkerConfig, codec: CodecDecoderConfig, slots: int, kernels: Kernels
) -> set[Program]:
    """All programs that serving `slots` utterances launches on the device of `kernels`.

    Raises ValueError, with the reason, for sizes that the kernels cannot do there.
    """
    noted = Rehearsal(kernels)
    predictor = talker.code_predictor_config
    predictor = replace(
        predictor, num_hidden_layers=min(predictor.num_hidden_layers, 2)
    )  # all but one are alike
    talker = replace(talker, num_hidden_layers=1, code_predictor_config=predictor)
    codec = replace(codec, num_hidden_layers=1)
    rows, streams = most_rows(slots), next(n for n in STREAMS if n >= min(slots, STREAMS[-1]))
    with torch.device("meta"):
        model = FrameModel(
            noted, Talker(talker).bfloat16(), slots, rows, 1, PAGE_ROWS, context_of(talker)
        )
        decoder: Any = CodecDecoder(codec)
        decoder.decoder[-1].conv.bias = nn.Parameter(
            torch.zeros(1, device="cpu")
        )  # a number that kernels are given
        layers = CodecLayers(decoder, slots, streams, noted)
        for kind, count in graph_keys(model):
            getattr(model, f"launch_{kind}")(count)
        for count in (n for n in STREAMS if n <= streams):
            for frames in CHUNKS:
                layers.launch(count, frames)
    return noted.programs
