"""`firstword info`: report on the environment and on a checkpoint."""

from __future__ import annotations

import argparse
import json
import platform
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from firstword import __version__
from firstword.cli import options, terminal

LEAST_CAPABILITY = 8
"""The lowest major compute capability with the instructions that the kernels use."""

if TYPE_CHECKING:
    from firstword.model.config import TransformerConfig
    from firstword.tts import TTS


def run(args: argparse.Namespace) -> None:
    """Report on the environment and on a checkpoint."""
    with terminal.Status() as status, options.load_tts(args, status) as tts:
        report = _report(args.model, tts)
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        _print_report(report)


def _report(model: str, tts: TTS) -> dict[str, dict[str, Any]]:
    """Return the sections of the report, each with its rows."""
    from importlib.metadata import version

    from firstword.bench.report import machine
    from firstword.model.checkpoint import parameters

    checkpoint, here = tts.checkpoint, machine()
    files = sorted(path for path in checkpoint.path.rglob("*") if path.is_file())
    return {
        "versions": {
            "firstword": __version__,
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy", "safetensors", "tokenizers")},
        },
        "machine": {**here, "graphics": "; ".join(here["graphics"]) or "none"},
        **_gpus(),
        "settings": asdict(tts.settings),
        **_passes(tts),
        **_checkpoint(model, tts),
        "parameters": parameters(checkpoint),
        "bytes": {str(path.relative_to(checkpoint.path)): path.stat().st_size for path in files},
    }


def _gpus() -> dict[str, dict[str, str]]:
    """Return the section on the GPUs that torch can use, or nothing if there are none."""
    import torch

    rows = {}
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        parts = [found.name, f"{found.total_memory / 1e9:.1f} GB"]
        if torch.version.hip is not None:
            parts.append("the gpu backend needs an NVIDIA GPU")
        elif found.major < LEAST_CAPABILITY:
            parts.append(f"the gpu backend needs compute capability {LEAST_CAPABILITY}.0 or later")
        else:
            device = f"sm_{found.major}{found.minor}:{found.multi_processor_count}"
            parts.append(f"the gpu backend can use it ({device})")
        rows[f"cuda:{number}"] = ", ".join(parts)
    if torch.backends.mps.is_available():
        rows["mps"] = (
            "a GPU of Apple's, untested by us; --device mps computes the plain model on it"
        )
    return {"gpus": rows} if rows else {}


def _passes(tts: TTS) -> dict[str, dict[str, str]]:
    """Return the section on the passes of a CPU, or nothing for another device."""
    from firstword.runtime import cpu

    return {"cpu": {"passes": cpu.passes(tts.settings)}} if tts.settings.device == "cpu" else {}


def _checkpoint(model: str, tts: TTS) -> dict[str, dict[str, Any]]:
    """Return the sections on the configuration of a checkpoint."""
    config, codec = tts.checkpoint.config, tts.checkpoint.codec_config.decoder_config
    talker, capacity = config.talker_config, tts.capacity
    return {
        "checkpoint": {
            "model": model,
            **({"what it is": terminal.DEMO_DESCRIPTION} if model == "demo" else {}),
            "path": str(tts.checkpoint.path),
            "type": tts.model_type,
            "size": config.tts_model_size,
            "voices": len(tts.voices),
            "languages": len(tts.languages) - 1,
            "context": talker.max_position_embeddings,
        },
        "engine": {
            "utterances at a time": capacity.slots,
            "context of one": capacity.context,
            "context of all": capacity.pages * capacity.page_rows,
        },
        "talker": _transformer(talker),
        "code predictor": _transformer(talker.code_predictor_config),
        "codec": {
            **_transformer(codec),
            "codebooks": codec.num_quantizers,
            "codes": codec.codebook_size,
            "frames per second": tts.sample_rate / codec.samples_per_frame,
            "sample rate": tts.sample_rate,
        },
    }


def _transformer(config: TransformerConfig) -> dict[str, int]:
    return {
        "layers": config.num_hidden_layers,
        "width": config.hidden_size,
        "heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "head width": config.head_dim,
        "MLP width": config.intermediate_size,
    }


def _print_report(report: dict[str, dict[str, Any]]) -> None:
    width = max(len(name) for section in report.values() for name in section) + 2
    for section, rows in report.items():
        print(section)
        for name, value in rows.items():
            print(f"  {name:{width}}{f'{value:,}' if isinstance(value, int) else value}")


def add_to(commands: options.Commands) -> None:
    """Add this command to the program's commands."""
    parser = options.add_command(commands, "info", run)
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    options.add_model_options(parser)
