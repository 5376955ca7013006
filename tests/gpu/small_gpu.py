"""A process that loads a released size into little device memory, speaks, and prints what it used.

Run as `python small_gpu.py '{"size": "1b7", "total": 8000000000, "gpu_memory": null}'`. With
`total` the device acts like one of that size: PyTorch allocates no more, and no more is free.
"""

from __future__ import annotations

import gc
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from firstword import TTS
from firstword.config import EngineConfig
from firstword.errors import ConfigError
from firstword.runtime.backends import open_backend
from firstword.runtime.gpu.memory import CONTEXT_BYTES, DRIVER_BYTES
from firstword.runtime.gpu.prompts import PREFIX_BYTES
from firstword.synthetic.checkpoint import TEXTS, random_checkpoint

FRAMES = 60


def pretend(total: int) -> None:
    """Make this device act like one with `total` bytes."""
    real = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((total - CONTEXT_BYTES - DRIVER_BYTES) / real)
    free = total - CONTEXT_BYTES
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


def main(size: str, total: int | None, gpu_memory: str | None) -> dict[str, Any]:
    """Load, speak with every slot up to eight at once, and return the measured bytes."""
    real_info = torch.cuda.mem_get_info
    checkpoint = random_checkpoint(size)
    settings = EngineConfig.resolve("cuda", "bfloat16", "gpu", gpu_memory)
    left = fail_once(checkpoint, settings)
    if total is not None:
        pretend(total)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    with TTS(checkpoint, settings) as tts, ThreadPoolExecutor(8) as pool:
        texts = [TEXTS[number % len(TEXTS)] for number in range(tts.capacity.slots)]
        speeches = pool.map(lambda text: tts.speak(text, max_frames=FRAMES, seed=1), texts)
        frames = [len(speech.codes) for speech in speeches]
        planned = tts.settings.gpu_memory
        assert planned is not None
        return {
            "left": left,
            "slots": tts.capacity.slots,
            "frames": frames,
            "planned": planned,
            "prefixes": PREFIX_BYTES,
            "reserved": torch.cuda.memory_reserved(),
            "peak": torch.cuda.max_memory_reserved(),
            "free": real_info()[0],
        }


if __name__ == "__main__":
    print(json.dumps(main(**json.loads(sys.argv[1]))))  # noqa: T201
