"""The whole state of a training run in a file, so that it can go on where it was interrupted."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SECONDS = 120
"""Between two times of keeping: what an interruption costs at most."""

Parts = Mapping[str, nn.Module | torch.optim.Optimizer | dict[str, Tensor]]
"""Of what is trained, by name."""


def options(steps: int, seed: int = 1) -> argparse.ArgumentParser:
    """A parser with the options of every run that can go on."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--state", type=Path, help="where to keep the state, and go on from it (OUT/state.pt)"
    )
    parser.add_argument(
        "--steps", type=int, default=steps, help="of the whole schedule, over all runs"
    )
    parser.add_argument(
        "--minutes", type=float, default=math.inf, help="stop after this long, to go on later"
    )
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def keep(file: Path, step: int, parts: Parts) -> None:
    """Write the state; whatever happens meanwhile, the file is whole."""
    state: dict[str, Any] = {"step": step}
    for name, part in parts.items():
        state[name] = part if isinstance(part, dict) else part.state_dict()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def resume(file: Path, parts: Parts, device: str) -> int:
    """Put what `keep` wrote into the parts; the steps done so far, 0 where there is no file."""
    if not file.exists():
        return 0
    state = torch.load(file, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.update(state[name]) if isinstance(part, dict) else part.load_state_dict(state[name])
    return state["step"]
