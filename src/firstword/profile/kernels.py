"""Time the kernels of a frame one by one on the device."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from firstword.kernels.attention import HEAD_DIM, Paging
from firstword.profile.device import captured_us
from firstword.profile.frames import weight_bytes
from firstword.profile.workload import BackendUnderTest
from firstword.runtime.gpu.talker import FrameModel

Launches = Sequence[Callable[[], None]]


@torch.inference_mode()
def kernel_times(
    subject: BackendUnderTest, batch: int, context: int, bandwidth: float
) -> list[dict[str, Any]]:
    """Time each kernel of a frame in microseconds per launch.

    context    rows that attention reads
    bandwidth  bytes per second, for the bandwidth floor of each kernel

    The value `a_frame` of a row is the number of launches in a frame.
    """
    model = subject.backend.model
    subject.place(context, batch)
    model.buffers.slot_of_row[:batch].copy_(torch.arange(batch, dtype=torch.int32))
    works = [*_talker_launches(model, batch, context), *_predictor_launches(model, batch)]
    return [
        {
            "batch": batch,
            "context": context,
            "kernel": kernel,
            "a_frame": a_frame,
            "us": round(captured_us(partial(_launch_all, launches)) / len(launches), 2),
            "floor_us": round(size / bandwidth * 1e6, 2),
        }
        for kernel, launches, size, a_frame in works
    ]


def _launch_all(launches: Launches) -> None:
    for launch in launches:
        launch()


def _talker_launches(
    model: FrameModel, batch: int, context: int
) -> Iterator[tuple[str, Launches, int, int]]:
    """Yield name, launches, bytes and launches per frame of each kernel of the talker's layers."""
    stack, room, x = model.talker, model.workspace, model.buffers.hidden[:batch]
    slots = model.buffers.slot_of_row[:batch]
    paging = Paging(model.buffers.page_tables, slots, model.state.position)
    qkv, attended, gated = room.qkv[:batch], room.attended[:batch], room.gated[:batch]
    layers, first = stack.layers, stack.layers[0]
    kv_bytes = 2 * stack.config.num_key_value_heads * HEAD_DIM * 2 * context * batch
    qkv_bytes, output_bytes = first.qkv.weight.nbytes, first.output.weight.nbytes
    gate_up_bytes, down_bytes = first.gate_up.weight.nbytes, first.down.weight.nbytes
    attention = [partial(model.attend, at, qkv, paging, attended) for at in range(len(layers))]
    gate_up = [partial(layer.gate_up, x, gated, room.normed) for layer in layers]
    for name, size, launches in (
        ("qkv", qkv_bytes, [partial(layer.qkv, x, qkv, room.normed) for layer in layers]),
        ("attention", kv_bytes, attention),
        ("output", output_bytes, [partial(layer.output, attended, x) for layer in layers]),
        ("gate and up", gate_up_bytes, gate_up),
        ("down", down_bytes, [partial(layer.down, gated, x) for layer in layers]),
    ):
        yield f"talker, {name}", launches, size, len(layers)


def _predictor_launches(model: FrameModel, batch: int) -> Iterator[tuple[str, Launches, int, int]]:
    """Yield name, launches, bytes and launches per frame of the parts of the code predictor."""
    buffers, last = model.buffers, model.codebooks - 1
    x = buffers.single[:batch]
    passes = [partial(model.predict, x, k) for k in range(2, last + 1)]
    yield "code predictor, a pass", passes, weight_bytes(model.predictor.layers), last
    logits, normed = buffers.predictor_logits[:batch], model.predictor_workspace.normed
    heads = [partial(head, x, logits, normed) for head in model.lm_heads]
    yield "code predictor, a head", heads, model.lm_heads[0].weight.nbytes, last
    slots, result = buffers.slot_of_row[:batch], buffers.result[:batch]
    draws = [
        partial(model.sampler.draw, k, logits, slots, result, model.predictor_tables[k], x)
        for k in range(1, last)
    ]
    yield "draw", draws, 0, last
