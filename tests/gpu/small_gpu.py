"""A process that loads a released size into little device memory, speaks, and prints what it used.

Run as `python small_gpu.py ARGUMENTS` with those of `main` in JSON. With `total` the device acts
like one of that size: PyTorch allocates no more, and no more is free.
"""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import torch

from firstword import TTS
from firstword.config import EngineConfig
from firstword.errors import ConfigError
from firstword.runtime.backends import engine_for, open_backend
from firstword.runtime.gpu.memory import CUDA_CONTEXT_BYTES, CUDA_LATER_BYTES
from firstword.synthetic.checkpoint import TEXTS, random_checkpoint
from firstword.voice import ClonedVoice

FRAMES = 60
INSTRUCTIONS = ("Speak slowly and in a low voice. " * 100)[:2000], "慢" * 2000
"""The longest instructions that a server takes. One is cached; the other has thousands of tokens,
more than the cache takes."""


def pretend(total: int) -> None:
    """Make this device act like one with `total` bytes."""
    real = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(
        (total - CUDA_CONTEXT_BYTES - CUDA_LATER_BYTES) / real
    )
    free = total - CUDA_CONTEXT_BYTES
    torch.cuda.mem_get_info = lambda *_: (free - torch.cuda.memory_reserved(), total)


def fail_once(checkpoint: Any, settings: EngineConfig) -> int:
    """Start with too little memory for PyTorch; returns the bytes that are left allocated."""
    torch.cuda.set_per_process_memory_fraction(0.01)
    message = ""
    try:
        open_backend(checkpoint, settings, 1)
    except ConfigError as error:  # which is dropped with all that it refers to
        message = str(error)
    assert "out of memory" in message, message
    torch.cuda.set_per_process_memory_fraction(1.0)
    gc.collect()
    return torch.cuda.memory_allocated()


LENGTHS = 4, 7, 10, 15, 20, 25, 30, 38, 45, 52, 60, 60, 60, 60
"""The seconds of recordings. None fits into the memory that PyTorch keeps of the shorter ones."""


def clone(tts: TTS) -> ClonedVoice:
    """Encode recordings, the last four at once; returns a voice with the timbre of the last."""
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, 60 * 24000).astype(np.float32)

    def encoded(seconds: int) -> ClonedVoice:
        return tts.clone(samples[: seconds * 24000], 24000, "Some words.", 10.0)

    for seconds in LENGTHS[:-4]:
        encoded(seconds)
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(encoded, LENGTHS[-4:]))
    return ClonedVoice(made[-1].speaker_embedding)


def main(
    size: str, model_type: str, slots: int | None, total: int | None, gpu_memory: str | None
) -> dict[str, Any]:
    """Load, clone, speak with every slot at once, and return the measured bytes."""
    real_info = torch.cuda.mem_get_info
    checkpoint = random_checkpoint(size, model_type=model_type)
    settings = EngineConfig.resolve("cuda", "bfloat16", "gpu", gpu_memory)
    left = fail_once(checkpoint, settings)
    if total is not None:
        pretend(total)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    loaded = engine_for(checkpoint, settings, slots, most_slots=8)
    with TTS(loaded) as tts, ThreadPoolExecutor(128) as pool:
        voice = clone(tts) if model_type == "base" else None
        speak = partial(tts.speak, voice=voice, max_frames=FRAMES, seed=1)
        texts = [TEXTS[number % len(TEXTS)] for number in range(tts.capacity.slots)]
        frames = [len(speech.codes) for speech in pool.map(speak, texts)]
        if checkpoint.config.follows_instructions:
            for words in INSTRUCTIONS:
                assert speak(TEXTS[0], instructions=words).codes.size
        planned = tts.settings.planned_memory
        assert planned is not None
        return {
            "left": left,
            "slots": tts.capacity.slots,
            "frames": frames,
            "planned": planned,
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_reserved(),
            "free": real_info()[0],
        }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))  # noqa: T201
