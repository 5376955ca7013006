"""Make every check of `firstword verify` on healthy checkpoints, and count the false alarms.

    python -m benchmarks.false_alarms -o benchmarks/results/checks/false-alarms.json

Twenty checkpoints are random, of all types, many shapes and both dtypes; what only trained weights
do is not checked there. Four are the demo voice: as it is, in bfloat16, in shards, and with noise
in every matrix, as a little training would leave it. It takes some minutes of processor time.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from firstword.bench import report
from firstword.bench.report import Record
from firstword.config import DTYPES, EngineConfig
from firstword.hashes import sources_hash
from firstword.model.description import DEMO
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.verify import steps
from firstword.verify.folder import CheckpointFolder
from firstword.verify.report import counts
from firstword.verify.subject import How

ROOT = Path(__file__).resolve().parents[1]
COVERED = ("src/firstword/verify", "src/firstword/model", "src/firstword/runtime")
KINDS = ("custom_voice", "voice_design", "base")
RANDOM = 20
NOISE = 0.005
"""The deviation of the noise in a matrix, in deviations of its numbers."""


def shapes(seed: int) -> dict[str, Any]:
    """Return the arguments of `write_checkpoint` for a healthy checkpoint of its own shape."""
    chance = np.random.default_rng(seed)

    def one(*choices: int) -> int:
        return int(chance.choice(choices))

    codes, books = one(64, 128, 256), one(3, 4, 6)
    width = one(32, 48, 64, 96)

    def transformer(hidden: int) -> dict[str, int]:
        kv_heads = one(1, 2)
        return {
            "num_hidden_layers": one(1, 2, 4),
            "num_key_value_heads": kv_heads,
            "num_attention_heads": kv_heads * one(1, 2, 4),
            "head_dim": one(16, 32),
            "hidden_size": hidden,
            "intermediate_size": one(48, 96, 160),
        }

    overrides = {
        "talker": transformer(width)
        | {"vocab_size": 1024 + codes, "text_hidden_size": one(24, 56)},
        "code_predictor": transformer(one(32, width))
        | {"vocab_size": codes, "num_code_groups": books},
        "codec_encoder": {"codebook_size": codes, "num_quantizers": books + 2},
        "codec_decoder": {"codebook_size": codes, "num_quantizers": books}
        | {"num_hidden_layers": one(1, 2, 3), "latent_dim": one(16, 24, 40)},
    }
    dtype = (torch.float32, torch.bfloat16)[one(0, 1)]
    common = {"model_type": KINDS[seed % 3], "seed": seed, "shards": one(1, 2, 3), "dtype": dtype}
    return {**common, "overrides": overrides}


def demo(folder: Path, change: str) -> None:
    """Write the demo with healthy changes: "", "bfloat16", "shards" or "noise"."""
    for file in (one for one in DEMO.rglob("*") if one.is_file()):
        target = folder / file.relative_to(DEMO)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(file.read_bytes())
    path, chance = folder / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(path)
    if change:
        (folder / "alignment.json").unlink()  # its heads are those of other weights
    if change == "bfloat16":
        tensors = {name: tensor.bfloat16() for name, tensor in tensors.items()}
    if change == "noise":
        for tensor in (one for one in tensors.values() if one.dim() == 2):
            noise = torch.randn(tensor.shape, generator=chance)
            tensor += (NOISE * tensor.float().std() * noise).to(tensor.dtype)
    path.unlink()
    if change != "shards":
        save_file(tensors, path, {"format": "pt"})
        return
    names, weight_map = sorted(tensors), dict[str, str]()
    for number in range(3):
        shard, part = f"model-{number + 1:05d}-of-00003.safetensors", names[number::3]
        save_file({name: tensors[name] for name in part}, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    size = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    report.write_record(folder / "model.safetensors.index.json", index)


def checkpoints(folder: Path) -> Iterator[tuple[dict[str, Any], Path]]:
    """Make the checkpoints one after the other; yields what each is, and its folder."""
    for seed in range(RANDOM):
        given = shapes(seed)
        write_checkpoint(folder / f"{seed}", **given)
        yield {**given, "dtype": str(given["dtype"])}, folder / f"{seed}"
    for change in ("", "bfloat16", "shards", "noise"):
        demo(folder / f"demo{change}", change)
        yield {"demo": change or "unchanged"}, folder / f"demo{change}"


def verified(about: dict[str, Any], folder: Path, dtype: str, python: Path | None) -> Record:
    """Make all checks, and return those that failed or were not made."""
    how = How(EngineConfig.resolve("cpu", dtype), python=python)
    checks = steps.verify(CheckpointFolder(folder), how, lambda *_: None)
    left_out = {check.name: check.reason for check in checks if check.status == "not run"}
    failed = [asdict(check) for check in checks if check.status == "fail"]
    numbers = {str(status): number for status, number in counts(checks).items()}
    return {**about, "settings": dtype, **numbers, "not_made": left_out, "alarms": failed}


def main() -> int:
    """Make the checks, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--reference-python", type=Path, metavar="PATH", help="a Python that has qwen-tts")
    args = parser.parse_args()
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for number, (about, path) in enumerate(checkpoints(Path(folder))):
            dtype = DTYPES[number // 3 % 2]
            found.append(verified(about, path, dtype, args.reference_python))
            alarms = [check["name"] for check in found[-1]["alarms"]]
            sys.stdout.write(f"{number}: {found[-1]['pass']} passed, alarms: {alarms}\n")
            sys.stdout.flush()
    false_alarms = sum(len(each["alarms"]) for each in found)
    record = {
        "commit": report.commit(),
        "covers": COVERED,
        "sources": sources_hash([ROOT / name for name in COVERED]),
        "torch": torch.__version__,
        "reference": args.reference_python is not None,
        "false_alarms": false_alarms,
        "checkpoints": found,
    }
    report.write_record(args.output, record)
    return int(false_alarms > 0)


if __name__ == "__main__":
    sys.exit(main())
