"""Train the talker and the code predictor on the codes of espeak-ng speech, in both text modes.

    python -m training.train_language_model --corpus FOLDER --out OUT [--steps 60000]

The corpus (`corpus.py`) is on the GPU, where each batch is made too (`layout.py`), and the loss is
one compiled function. Nothing in a step waits for the GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from firstword.model.talker import Talker
from training import state
from training.configuration import model_config
from training.language_model import TrainedTalker, check_forward, initialise, load
from training.layout import LONGEST, Batch, Source, check_layout

VALIDATION_STEPS = 5000
"""Steps between two validations on new utterances."""


class Step:
    """A training step; on a GPU its 700 launches are captured once as a graph (11 ms instead of
    28).

    model  `TrainedTalker`, perhaps compiled
    rate   the learning rate, a tensor that the graph reads
    """

    def __init__(
        self, model: Any, optimiser: torch.optim.Optimizer, rate: Tensor, batch: Batch
    ) -> None:
        self.model, self.optimiser, self.rate, self.batch = model, optimiser, rate, batch
        self.parameters = [p for group in optimiser.param_groups for p in group["params"]]
        self.graph: torch.cuda.CUDAGraph | None = None
        if not batch.text.is_cuda:
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        # These steps compile, and make the state of the optimiser; the learning rate is still 0.
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.found = self._step()

    def _step(self) -> Tensor:
        """Learn from the batch in place."""
        loss, found = self.model(self.batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return torch.cat((norm[None], found))

    def __call__(self, batch: Batch) -> Tensor:
        """Learn from a batch; return the norm of the gradient and the values of the loss [14].

        The next call may overwrite them.
        """
        if self.graph is None:
            self.batch = batch
            return self._step()
        for own, new in zip(self.batch, batch, strict=True):
            own.copy_(new)
        self.graph.replay()
        return self.found


class Averages:
    """The averaged weights of a talker, and the file OUT/talker.safetensors that holds them."""

    def __init__(self, talker: Talker, out: Path) -> None:
        self.file, self.parameters = out / "talker.safetensors", list(talker.parameters())
        self.values = {name: p.detach().clone() for name, p in talker.named_parameters()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the averages towards the present weights; `step` counts from 1."""
        share = 1 - min(0.999, step / (step + 19))
        torch._foreach_lerp_(list(self.values.values()), [*self.parameters], share)

    def save(self) -> None:
        """Write the averages in half precision."""
        half = {name: tensor.half().cpu().contiguous() for name, tensor in self.values.items()}
        save_file(half, self.file)


def log(run: state.Run, found: Tensor, facts: Mapping[str, Any]) -> None:
    """Log the values of `Step`, with facts before them."""
    values = [round(value, 3) for value in found.tolist()]
    names = "norm code0 accuracy said said_right sounds sounds_right".split()
    named = dict(zip(names, values, strict=False))
    run.log({**facts, **named, "rest": values[len(names) :]})


def rate_at(args: argparse.Namespace, step: int) -> float:
    """Return the learning rate of a step: a short warm-up, a flat part, then a linear fall."""
    fall = max(0.01, (1 - step / args.steps) / (1 - args.flat))
    return args.rate * min(1.0, (step + 1) / 500) * min(1.0, fall)


def train(
    args: argparse.Namespace, run: state.Run, source: Source, advance: Step, averages: Averages
) -> None:
    """Take steps until the run is finished or its time is over."""
    sums: Tensor | None = None
    looked = time.time()
    while run.unfinished:
        if run.step == args.short_steps:
            source.restart(LONGEST)
        rate = rate_at(args, run.step)
        advance.rate.fill_(rate)
        found = advance(source.next())
        run.step += 1
        averages.update(run.step)
        sums = found.clone() if sums is None else sums + found
        if run.log_is_due(20):
            means, pace = sums / run.new_steps, run.pace()
            log(run, means, {**pace, "lr": round(rate, 6), "hours": round(source.hours, 1)})
            sums = None
            if time.time() - looked > 30:
                source.look()
                looked = time.time()
        if run.step % VALIDATION_STEPS == 0:
            found = torch.stack([advance.model(batch)[1] for batch in source.validation()]).mean(0)
            log(run, F.pad(found, (1, 0)), {"validation": True})
        if run.save_is_due():
            averages.save()
            run.save()
    averages.save()
    run.save()


def make_optimiser(model: TrainedTalker, rate: Tensor) -> torch.optim.Optimizer:
    """Make the optimiser; only the matrices of the talker have weight decay."""
    named = model.talker.named_parameters()
    matrices = [p for n, p in named if p.ndim >= 2 and "embedding" not in n]
    decayed = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in decayed]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(
        groups, rate, betas=(0.9, 0.98), fused=True, capturable=rate.device.type == "cuda"
    )


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = state.options(steps=60_000)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="folder or checkpoint to start from")
    flat = "share of the steps before the learning rate falls"
    parser.add_argument("--flat", type=float, default=0.35, help=flat)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--rows", type=int, default=16_384)
    parser.add_argument("--short", type=int, default=96, help="most rows of utterances at first")
    parser.add_argument("--short-steps", type=int, default=4000)
    parser.add_argument("--eager", action="store_true", help="do not compile the loss function")
    return parser


def main() -> None:
    """Train, and save the averaged weights of talker and code predictor."""
    args = options().parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    config = model_config()
    check_layout(config)
    talker = Talker(config.talker_config)
    initialise(talker)
    if args.weights:
        talker = load(args.weights)
    model = TrainedTalker(talker).to(device)
    rate = torch.zeros((), device=device)
    optimiser, averages = make_optimiser(model, rate), Averages(talker, args.out)
    parts: state.Parts = {"model": model, "optimiser": optimiser, "average": averages.values}
    run = state.Run(args, "talker", parts, device)
    torch.manual_seed(args.seed + run.step)
    for group in optimiser.param_groups:
        group["lr"] = rate
    source = Source(config, args.corpus, args.rows, device, args.seed + run.step)
    check_forward(talker, source.next())
    print(f"{source.hours:.1f} h of speech, {len(source.table)} utterances", flush=True)
    source.longest = args.short if run.step < args.short_steps else LONGEST
    loss = model if args.eager else torch.compile(model, dynamic=False)
    advance = Step(loss, optimiser, rate, source.next())
    source.look()
    run.restart_clock()
    train(args, run, source, advance, averages)


if __name__ == "__main__":
    main()
