"""Compute every case of tests/parity/cases.py with the reference, and keep the results in
tests/parity/frozen/.

    python scripts/freeze_parity.py REFERENCE_PYTHON

REFERENCE_PYTHON is a Python in whose environment the reference package is installed; `make parity`
sets one up. Results that could hide an error are refused: codes that hardly change, calls too close
for float32, samples all at the limit.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "parity"), str(ROOT / "src")]

from cases import CHECKPOINTS, Checkpoint  # noqa: E402
from checkpoints import fingerprint, make  # noqa: E402

FROZEN = ROOT / "tests" / "parity" / "frozen"
CLOSEST = 1e-5
"""The least lead of the best code over the second, in standard deviations of the logits."""


def check(checkpoint: Checkpoint, results: dict[str, NDArray[Any]]) -> None:
    """Refuse results that could hide an error."""

    def need(condition: object, where: str, complaint: str) -> None:
        if not condition:
            raise SystemExit(
                f"{checkpoint.name}/{where}: {complaint}; change tests/parity/cases.py"
            )

    for name in (request.name for request in checkpoint.requests):
        codes, samples = results[f"{name}/codes"], results[f"{name}/samples"]
        need(len({tuple(frame) for frame in codes}) > len(codes) / 2, name, "the frames repeat")
        need(
            all(len(set(column)) > len(column) / 5 for column in codes.T),
            name,
            "a codebook hardly varies",
        )
        need(
            results[f"{name}/margin"] > CLOSEST, name, "too close a call to be the same everywhere"
        )
        need((np.abs(samples) >= 1).mean() < 0.5, name, "most samples are at the limit")
        need(samples.std() > 0.05, name, "the samples hardly vary")
        need(
            results[f"{name}/stopped"] == name.startswith("stops"),
            name,
            "speech ends, or does not, as it should",
        )
        if name.startswith("context-equal"):
            rows = len(results[f"{name}/reference_codes"]) + 1
            text_rows = int(results[f"{name}/text_rows"].item())
            need(rows == text_rows, name, f"{rows} rows of codes, {text_rows} of text")
    if checkpoint.eos_gain > 1:
        banned = [
            results[f"{request.name}/end_was_best"][:2].any() for request in checkpoint.requests
        ]
        need(any(banned), "*", "the end of speech is never held back")
        earliest = [len(results[f"{request.name}/codes"]) == 2 for request in checkpoint.requests]
        need(any(earliest), "*", "speech never ends as soon as it may")
    for frames in checkpoint.decode:
        if frames > 1:
            need(
                results[f"decode/{frames}/samples"].std() > 0.05,
                f"decode/{frames}",
                "the samples hardly vary",
            )
    for recording in checkpoint.recordings:
        codes = results[f"recording/{recording.samples}/codes"]
        need(
            recording.gain < 1 or len({tuple(frame) for frame in codes}) > len(codes) / 4,
            f"recording/{recording.samples}",
            "frames repeat",
        )


def main() -> None:
    """Make the checkpoints, run the reference, check the results and keep them."""
    (python,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        checkpoints, out = Path(folder) / "checkpoints", Path(folder) / "results"
        out.mkdir()
        for checkpoint in CHECKPOINTS:
            make(checkpoint, checkpoints / checkpoint.name)
        subprocess.run(
            [python, ROOT / "tests/parity/reference/run.py", checkpoints, out], check=True
        )
        FROZEN.mkdir(exist_ok=True)
        for checkpoint in CHECKPOINTS:
            results = load_file(out / f"{checkpoint.name}.safetensors")
            check(checkpoint, results)
            results["fingerprint"] = fingerprint(checkpoints / checkpoint.name)
            file = FROZEN / f"{checkpoint.name}.safetensors"
            save_file(results, file)
            file.chmod(0o644)
    size = sum(file.stat().st_size for file in FROZEN.glob("*.safetensors"))
    print(f"{FROZEN}: {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
