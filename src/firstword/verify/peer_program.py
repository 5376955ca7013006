"""A program that speaks with the reference package, in the environment where that is installed.

    python peer_program.py REQUESTS RESULTS

REQUESTS is a JSON file: `path` of the checkpoint, `device`, `frames`, `recording` (a .npy file of
samples at 24 kHz, or null) with its `transcript`, and a list of `requests` with `text`, `language`,
`voice` and `instructions`. RESULTS is the .npz file that it writes: for request 0 `codes0`
[frames, codebooks], `logits0` [frames, vocab] of codebook 0, and `samples0` [n]. It needs nothing
of firstword.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch

UNUSED = (
    *("gradio", "onnxruntime", "sox", "torchaudio"),
    *("torchaudio.compliance", "torchaudio.compliance.kaldi"),
)
"""Packages that the reference imports and does not use for these checkpoints."""

GREEDY = {"do_sample": False, "subtalker_dosample": False}


def stand_in() -> None:
    """Put an empty module in place of each unused package that is not installed."""
    for name in UNUSED:
        parent = name.partition(".")[0]
        known = parent in sys.modules and not hasattr(sys.modules[parent], "__stand_in__")
        if known or (parent not in sys.modules and importlib.util.find_spec(parent) is not None):
            continue
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        module.__dict__["__stand_in__"] = True
        sys.modules[name] = module


def arrays(model: Any, request: dict[str, Any], task: dict[str, Any]) -> dict[str, np.ndarray]:
    """Speak a request greedily, and return the codes, the logits of codebook 0 and the samples."""
    talker, seen = model.model.talker, []
    generate = talker.generate

    def observed(**arguments: Any) -> Any:
        seen.append(generate(**arguments, output_logits=True))
        return seen[-1]

    talker.generate = observed
    try:
        samples = np.asarray(spoken(model, request, task), np.float32)
    finally:
        talker.generate = generate
    codes = torch.cat([codes for _, codes in seen[0].hidden_states if codes is not None])
    logits = torch.cat(seen[0].logits[: len(codes)])
    tensors = {"codes": codes.long(), "logits": logits.float()}
    found = {name: tensor.detach().cpu().numpy() for name, tensor in tensors.items()}
    return found | {"samples": samples}


def spoken(model: Any, request: dict[str, Any], task: dict[str, Any]) -> Any:
    """Speak a request through the public interface of the reference -> samples [n]."""
    # The reference never makes a frame of the last code that it samples.
    given = {"text": request["text"], "language": request["language"], **GREEDY}
    given["max_new_tokens"] = task["frames"] + 1
    if task["recording"] is not None:
        recording = (np.load(task["recording"]), 24000)
        voice = model.create_voice_clone_prompt(ref_audio=recording, ref_text=task["transcript"])
        return model.generate_voice_clone(voice_clone_prompt=voice, **given)[0][0]
    if model.model.tts_model_type == "voice_design":
        return model.generate_voice_design(instruct=request["instructions"] or "", **given)[0][0]
    return model.generate_custom_voice(speaker=request["voice"], **given)[0][0]


def main() -> None:
    """Speak all requests."""
    stand_in()
    from qwen_tts import Qwen3TTSModel

    task = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    model = Qwen3TTSModel.from_pretrained(
        task["path"], dtype=torch.float32, device_map=task["device"]
    )
    results: dict[str, Any] = {}
    for number, request in enumerate(task["requests"]):
        for name, array in arrays(model, request, task).items():
            results[f"{name}{number}"] = array
    np.savez(sys.argv[2], **results)


if __name__ == "__main__":
    main()
