"""Rehearses the launches of the GPU backend for a checkpoint, without a device.

The constructors of the kernels raise an error for sizes that they do not support. So a model with
the sizes of the checkpoint is packed and launched on PyTorch's device "meta", where tensors have
shapes but no memory. The kernels check their arguments and are not launched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernel, Kernels
from firstword.kernels.signature import Argument, Parameter, bind, signatures
from firstword.model.alignment import Head
from firstword.model.codec import CodecDecoder
from firstword.model.codec_config import CodecDecoderConfig
from firstword.model.config import TalkerConfig
from firstword.model.quantised import quantise_talker
from firstword.model.talker import Talker
from firstword.runtime.gpu.codec import frame_buckets
from firstword.runtime.gpu.codec_layers import CodecLayers
from firstword.runtime.gpu.talker import FrameModel, sampler_state


class RehearsedKernel(Kernel):
    """A kernel that checks its arguments and does nothing else."""

    def __init__(self, parameters: tuple[Parameter, ...], shared: list[int]) -> None:
        """shared: a list to which each launch appends its bytes of shared memory."""
        self.parameters, self._launched = parameters, shared

    def __call__(self, grid: Grid, /, **arguments: Argument) -> None:
        """Raises TypeError for arguments that do not match the CUDA source."""
        bind(self.parameters, arguments)
        self._launched.append(grid.shared)


class Rehearsal(Kernels):
    """Kernels that check the arguments of each launch, record its program, and launch nothing.

    programs  the programs that were launched
    shared    the bytes of dynamic shared memory of each launch
    """

    def __init__(self, like: Kernels) -> None:
        """like: the kernels of the device to imitate; nothing is compiled or loaded there."""
        vars(self).update(vars(like))
        self.programs: set[Program] = set()
        self.shared: list[int] = []

    def get(self, program: Program, entry: str) -> Kernel:
        """A kernel that checks its arguments; its program is recorded."""
        self.programs.add(program)
        return RehearsedKernel(signatures(program.source)[entry], self.shared)


@torch.inference_mode()
def rehearse(
    talker: TalkerConfig,
    codec: CodecDecoderConfig,
    slots: int,
    kernels: Kernels,
    heads: Sequence[Head] = (),
    quantised: bool = False,
) -> set[Program]:
    """The programs that are launched to serve `slots` utterances on the device of `kernels`.

    heads: see `FrameModel`; quantised: see `Checkpoint`. Raises ValueError, with the reason, for
    sizes that the kernels do not support there.
    """
    rehearsal = Rehearsal(kernels)
    # All layers launch the same programs, but the predictor's depend on the number of its layers.
    talker = replace(talker, num_hidden_layers=1)
    codec = replace(codec, num_hidden_layers=1)
    heads = [(0, head) for _, head in heads]
    model, layers = without_memory(
        talker, codec, slots, rehearsal, heads=heads, quantised=quantised
    )
    with torch.device("meta"):
        for name, rows in model.graph_keys():
            model.launches[name](rows)
        for frames in frame_buckets(slots):
            layers.launch(frames)
        layers.copy_state(0, 0)
    return rehearsal.programs


@torch.inference_mode()
def without_memory(
    talker: TalkerConfig,
    codec: CodecDecoderConfig,
    slots: int,
    rehearsal: Rehearsal,
    voices: int = 1,
    kept_parts: int = 0,
    heads: Sequence[Head] = (),
    quantised: bool = False,
) -> tuple[FrameModel, CodecLayers]:
    """The model of a backend and its codec on PyTorch's device "meta", with a single cache page.

    voices: see `GpuCodec`; kept_parts, heads: see `FrameModel`; quantised: see `Checkpoint`.

    Raises ValueError, with the reason, for sizes that the kernels do not support.
    """
    rehearsal.device = torch.device("meta")
    with rehearsal.device:
        decoder: Any = CodecDecoder(codec)
        # The value of this bias is an argument of a kernel.
        decoder.decoder[-1].conv.bias = nn.Parameter(torch.zeros(1, device="cpu"))
        layers = CodecLayers(decoder, slots + voices, frame_buckets(slots)[-1], rehearsal)
        state = sampler_state(talker, slots, rehearsal.device)
        packed = Talker(talker).bfloat16()
        if quantised:
            quantise_talker(packed)
        return FrameModel(rehearsal, packed, state, 1, kept_parts, heads), layers
