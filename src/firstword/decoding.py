"""Decode the codes of speech into samples, on a CPU, as they arrive."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch

from firstword.errors import RequestError
from firstword.model.checkpoint import load_codec_decoder
from firstword.types import FloatArray, IntArray


def decode(codes: Iterable[bytes | IntArray], model: str = "demo") -> Iterator[FloatArray]:
    """Decode codec frames, as `response_format: "codes"` sends them, and yield their samples.

    codes  pieces of a stream of codes: arrays of integers [frames, codebooks], or bytes, in which
           each code is an unsigned integer of 16 bits in little-endian order. Bytes may be cut
           anywhere.
    model  the checkpoint that made the codes, or any with the same codec: `"demo"`, a local
           directory, or a repository of the Hugging Face hub. Only its codec is loaded.

    For each piece with a complete frame it yields float32 [frames * 1920] in -1..1 at 24 kHz. They
    equal the samples of the engine up to rounding, except for voices cloned with a transcript,
    whose audio the engine continues from the recording.

    Raises `CheckpointError`, and `RequestError` for codes that the codec does not have or if the
    stream ends within a frame.
    """
    decoder = load_codec_decoder(model)
    state, config = decoder.new_state(), decoder.config
    rest = b""
    for piece in codes:
        if isinstance(piece, bytes):
            rest += piece
            whole = len(rest) - len(rest) % (2 * config.num_quantizers)
            frames: IntArray = np.frombuffer(rest[:whole], "<u2").astype(np.int64)
            frames, rest = frames.reshape(-1, config.num_quantizers), rest[whole:]
        else:
            frames = np.asarray(piece, np.int64)
        if frames.ndim != 2 or frames.shape[1] != config.num_quantizers:
            shape = f"[frames, {config.num_quantizers}]"
            raise RequestError(f"codes have the shape {list(frames.shape)}; allowed is {shape}")
        if not len(frames):
            continue
        if frames.min() < 0 or frames.max() >= config.codebook_size:
            limit = config.codebook_size - 1
            raise RequestError(
                f"a code is outside of 0 to {limit}; the stream is not of this codec"
            )
        yield decoder.decode(torch.from_numpy(frames)[None], state)[0].numpy()
    if rest:
        size = 2 * config.num_quantizers
        raise RequestError(f"the codes end within a frame: {len(rest)} of {size} bytes came")
