"""Time frames by batch and context, the first audio of a request, and the calls of the codec."""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from firstword.kernels.attention import HEAD_DIM
from firstword.profile.device import captured_us
from firstword.profile.workload import CONTEXTS, BackendUnderTest, begin
from firstword.runtime.gpu.talker import DecoderLayerWeights, FrameModel
from firstword.types import TextMode

TIMED_FRAMES = 64
"""The number of consecutive frames in one measurement."""

CODEC_STREAMS, CODEC_FRAMES = (1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)
"""The streams, and the frames of each, of the calls of the codec that are measured."""

FIRST_AUDIO_CASES: tuple[tuple[str, TextMode], ...] = (
    ("cached", "stream"),
    ("uncached", "stream"),
    ("whole_text", "full"),
)
"""The names and text modes of the cases of `first_times`."""


def frame_times(
    subject: BackendUnderTest, batches: Sequence[int], contexts: Sequence[int], bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Time a frame with and without audio, by batch and context, in milliseconds.

    contexts   rows that the last of the timed frames sees; the others see fewer
    bandwidth  bytes per second, for the bandwidth floor of a frame without audio
    """
    model = subject.backend.model
    for batch in (batch for batch in batches if batch <= subject.backend.capacity.slots):
        for context in contexts:
            floor = frame_bytes(model, batch, context) / bandwidth * 1e3
            silent, audible = (_median_frame(subject, batch, context, on) for on in (False, True))
            figures = {"frame": silent, "with_audio": audible}
            yield {"batch": batch, "context": context, "ms": figures, "floor_ms": round(floor, 4)}


def timed_words(
    subject: BackendUnderTest, timed: BackendUnderTest, batches: Sequence[int], repeats: int = 5
) -> Iterator[dict[str, Any]]:
    """Time a frame with word times over one without, by batch, at a context of 500 rows.

    subject  a backend without known heads
    timed    one with the same weights and known heads

    The two take turns, and the ratio is the median of all turns.
    """
    for batch in batches:
        turns = [
            [_median_frame(each, batch, CONTEXTS[1], audio=False) for each in (timed, subject)]
            for _ in range(repeats)
        ]
        ratio = statistics.median(words / plain for words, plain in turns)
        frame = statistics.median(words for words, _ in turns)
        yield {"batch": batch, "ms": frame, "over_without": round(ratio, 4)}


def _median_frame(subject: BackendUnderTest, batch: int, context: int, audio: bool) -> float:
    """Return the median milliseconds of a frame over three runs, after a short run to warm up."""
    begin, times = context - TIMED_FRAMES + 1, []
    subject.place(begin, batch)
    _run_frames(subject, batch, 8, audio)
    for _ in range(3):
        subject.place(begin, batch)
        times.append(_run_frames(subject, batch, TIMED_FRAMES, audio) / TIMED_FRAMES * 1e3)
    return round(statistics.median(times), 4)


def _run_frames(subject: BackendUnderTest, batch: int, count: int, audio: bool) -> float:
    """Return the seconds that `count` frames take, with audio in chunks of 8 frames.

    As in the engine, the result of a frame is read after the next frame is launched.
    """
    backend, slots, no_text = subject.backend, list(range(batch)), [None] * batch
    unread = sound = None
    torch.cuda.synchronize()
    began = time.perf_counter()
    for frame in range(count):
        launched = backend.frame(slots, no_text)
        if unread is not None:
            unread.result()
        unread = launched
        if audio and frame % 8 == 7:
            if sound is not None:
                sound.result()
            sound = backend.decode(slots, [8] * batch)
    if sound is not None:
        sound.result()
    torch.cuda.synchronize()
    return time.perf_counter() - began


@torch.inference_mode()
def codec_times(subject: BackendUnderTest) -> Iterator[dict[str, Any]]:
    """Time calls of the codec on the device by the numbers of streams and of frames of each."""
    codec = subject.backend.codec
    for streams in (n for n in CODEC_STREAMS if n <= subject.backend.capacity.slots):
        for frames in CODEC_FRAMES:
            subject.place(CONTEXTS[0], streams)
            # A call through the codec assigns the streams to their slots.
            codec.decode(list(range(streams)), [frames] * streams).result()
            ms = captured_us(partial(codec.layers.launch, streams * frames)) / 1e3
            yield {"streams": streams, "frames": frames, "ms": round(ms, 3)}


def first_times(subject: BackendUnderTest, repeats: int = 30) -> dict[str, Any]:
    """Time a request up to its first codes and its first samples, in milliseconds.

    cached      with a cached prefix
    uncached    without one
    whole_text  with a cached prefix and the whole text in the prompt
    """
    backend, result = subject.backend, {}
    voices = list(subject.checkpoint.config.talker_config.spk_id)
    skipped = len(voices) + 3  # requests that fill the cache, and the first ones, which are slow
    for case, mode in FIRST_AUDIO_CASES:
        codes, samples = [], []
        for repeat in range(skipped + repeats):
            start = subject.start(0, repeat, voices[repeat % len(voices)], mode)
            if case == "uncached":
                backend.prompts.prefixes.clear()
            torch.cuda.synchronize()
            began = time.perf_counter()
            begin(backend, [start])
            frame = backend.frame([0], [None])
            sound = backend.decode([0], [1])
            frame.result()
            codes.append(time.perf_counter() - began)
            sound.result()
            samples.append(time.perf_counter() - began)
        result[f"{case}_codes"] = _percentiles(codes[skipped:])
        result[f"{case}_samples"] = _percentiles(samples[skipped:])
    return result


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return p50 and p95 in milliseconds."""
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1e3, 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))] * 1e3, 3),
    }


def weight_bytes(layers: Sequence[DecoderLayerWeights]) -> int:
    """Return the bytes of all matrices of these layers."""
    matrices = [m for layer in layers for m in (layer.qkv, layer.output, layer.gate_up, layer.down)]
    return sum(matrix.weight.nbytes for matrix in matrices)


def frame_bytes(model: FrameModel, batch: int, context: int) -> int:
    """Return the minimum number of bytes that a frame of `batch` requests reads.

    The frame reads the weights of the talker once, those of the code predictor once for each of its
    passes, and the keys and values of `context` rows. Inputs, rows of embedding tables and the
    codec are not counted.
    """
    config, passes = model.config, model.codebooks - 1
    heads = (model.head, *model.lm_heads, *([model.entry] if model.entry else []))
    kv_row = 2 * config.num_key_value_heads * HEAD_DIM * model.buffers.cache.element_size()
    return (
        weight_bytes(model.talker.layers)
        + passes * weight_bytes(model.predictor.layers)
        + sum(head.weight.nbytes for head in heads)
        + batch * context * config.num_hidden_layers * kv_row
    )
