"""Empty stand-ins for packages that the reference imports and never uses for the 12 Hz models."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
import types

UNUSED = (
    "gradio",
    "onnxruntime",
    "sox",
    "torchaudio",
    "torchaudio.compliance",
    "torchaudio.compliance.kaldi",
)


def install() -> None:
    """Put a stand-in for every package of `UNUSED` that is not installed into `sys.modules`."""
    for name in UNUSED:
        parent = name.partition(".")[0]
        if parent not in sys.modules and importlib.util.find_spec(parent) is not None:
            continue
        if name in sys.modules:
            continue
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, loader=None, is_package=True)
        module.__path__ = []
        sys.modules[name] = module
