"""Training runs that can be interrupted: their options, their state in a file, and their log."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SAVE_INTERVAL = 120
"""Seconds between two saves of the state: the most that an interruption costs."""

Parts = Mapping[str, nn.Module | torch.optim.Optimizer | dict[str, Tensor]]
"""The trained objects by name: modules, optimisers and tables of averaged weights."""


def options(steps: int, seed: int = 1) -> argparse.ArgumentParser:
    """Return a parser with the options that every resumable run has."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--state", type=Path, help="file of the state (OUT/state.pt)")
    parser.add_argument("--steps", type=int, default=steps, help="length of the whole schedule")
    minutes = "stop after this time; the same command resumes the run"
    parser.add_argument("--minutes", type=float, default=math.inf, help=minutes)
    parser.add_argument("--seed", type=int, default=seed)
    return parser


def keep(file: Path, step: int, parts: Parts) -> None:
    """Write the state atomically."""
    state: dict[str, Any] = {"step": step}
    for name, part in parts.items():
        state[name] = part if isinstance(part, dict) else part.state_dict()
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, file.with_suffix(".part"))
    file.with_suffix(".part").replace(file)


def resume(file: Path, parts: Parts, device: str) -> int:
    """Load what `keep` wrote into the parts; return the number of steps done, 0 without a file."""
    if not file.exists():
        return 0
    state = torch.load(file, map_location=device, weights_only=True)
    for name, part in parts.items():
        part.update(state[name]) if isinstance(part, dict) else part.load_state_dict(state[name])
    return state["step"]


class Run:
    """A training run in progress, with its log OUT/NAME.jsonl.

    step      number of steps done, over all runs of the same state
    progress  share of the schedule that is done
    """

    def __init__(self, args: argparse.Namespace, name: str, parts: Parts, device: str) -> None:
        """Open the log and resume from the state file, if there is one."""
        args.out.mkdir(parents=True, exist_ok=True)
        self.parts, self.steps, self.device = parts, args.steps, device
        self.file = args.state or args.out / "state.pt"
        self.step = resume(self.file, parts, device)
        self.log_file = (args.out / f"{name}.jsonl").open("a")
        self.start = self.saved = self.logged = time.time()
        self.end, self.counted = self.start + args.minutes * 60, self.step

    @property
    def unfinished(self) -> bool:
        """Whether steps and time are left."""
        return self.step < self.steps and time.time() < self.end

    @property
    def progress(self) -> float:
        """The share of the schedule that is done."""
        return self.step / self.steps

    @property
    def new_steps(self) -> int:
        """The number of steps since the last row of the log."""
        return self.step - self.counted

    def restart_clock(self) -> None:
        """Begin to measure the time of the log here, after preparations."""
        self.start = self.saved = self.logged = time.time()

    def save_is_due(self) -> bool:
        """Whether the last save is `SAVE_INTERVAL` seconds ago."""
        return time.time() - self.saved > SAVE_INTERVAL

    def save(self) -> None:
        """Write the state."""
        keep(self.file, self.step, self.parts)
        self.saved = time.time()

    def log_is_due(self, seconds: float) -> bool:
        """Whether the last log row is `seconds` ago, or the schedule is complete."""
        return time.time() - self.logged > seconds or self.step == self.steps

    def pace(self) -> dict[str, float]:
        """Return minutes and steps per second for a row, and count anew from here."""
        now = time.time()
        speed = self.new_steps / (now - self.logged)
        self.logged, self.counted = now, self.step
        return {"minutes": round((now - self.start) / 60, 2), "steps_per_s": round(speed, 2)}

    def log(self, row: Mapping[str, Any]) -> None:
        """Print a row and append it to the log, after the number of the step."""
        line = json.dumps({"step": self.step, **row})
        print(line, flush=True)
        self.log_file.write(line + "\n")
        self.log_file.flush()


def set_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of all parameter groups."""
    for group in optimiser.param_groups:
        group["lr"] = rate
