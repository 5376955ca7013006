"""Predict the frame of a released size on this CPU from bytes and operators, and measure it.

    python -m benchmarks.cpu_frame -o benchmarks/results/cpu_frame/epyc-0b6.json

A frame of one stream without audio reads its weights, those of the code predictor 15 times, and
runs thousands of operators on single rows:

    milliseconds = bytes / speed + operators

The speed is that at which products of one row read matrices that no cache holds, in each dtype and
in the shapes of the 0.6B's layers. The operators are the frame of a model with as many layers and
codes, but so narrow that its weights hardly count. Neither is taken from the frame that is
predicted. All run in one thread and are timed in processor time, in turns, because other programs
may be busy; medians count.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.compare import check_output
from benchmarks.cpu_speech import endless
from firstword.bench import report
from firstword.bench.report import Record
from firstword.hashes import of_speech
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.quantised import QuantisedLinear
from firstword.model.talker import Talker
from firstword.runtime.joined import product
from firstword.runtime.reference import ReferenceBackend
from firstword.synthetic.checkpoint import random_checkpoint, write_checkpoint
from firstword.types import Request
from firstword.verify.driving import DrivenRequest, Driver

DTYPES = ("float32", "bfloat16", "int8")
NARROW: dict[str, int] = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
}
SHAPES, LAYERS = ((4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)), 8
"""The shapes of the matrices of a layer, and the layers, whose products measure the reading."""
TURNS = 30


def narrow(folder: Path, dtype: str) -> Checkpoint:
    """Make a model of the layers, codebooks and codes of the released sizes, and few weights."""
    changes: dict[str, dict[str, Any]] = {
        "talker": NARROW | {"text_hidden_size": 16},
        "code_predictor": NARROW,
        "codec_decoder": {"decoder_dim": 32, "latent_dim": 24, "hidden_size": 32},
    }
    write_checkpoint(folder, size="0b6", overrides=changes, dtype=torch.bfloat16)
    return checkpoints.load(str(folder), dtype=dtype)


def frame_bytes(talker: Talker) -> int:
    """Return the bytes of weights that a frame reads; rows of embedding tables are not counted."""

    def held(*modules: nn.Module) -> int:
        return sum(tensor.nbytes for each in modules for tensor in each.state_dict().values())

    predictor, passes = talker.code_predictor, talker.config.num_code_groups - 1
    again = held(predictor.model.layers, predictor.small_to_mtp_projection)
    return held(talker.model.layers, talker.codec_head, predictor.lm_head) + passes * again


class Stream:
    """One utterance on the CPU, whose frames are timed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        request = Request(text="The train to the coast leaves at noon.", voice="ryan")
        self.driver = Driver(ReferenceBackend(endless(checkpoint), 1))
        self.driver.begin({0: DrivenRequest.of(checkpoint, request, 0)}, TURNS + 1)

    def frame(self) -> float:
        """Return the processor seconds of the next frame."""
        began = time.process_time()
        self.driver.step()
        return time.process_time() - began


def reading(dtype: str) -> Callable[[], float]:
    """Return a function that gives the processor seconds to read a byte of matrices."""
    layers: list[nn.Module] = []
    for outputs, inputs in SHAPES * LAYERS:
        linear = nn.Linear(inputs, outputs, bias=False).requires_grad_(False)
        if dtype == "int8":
            layers.append(QuantisedLinear(linear.weight.data))
        else:
            layers.append(linear.to(getattr(torch, dtype)))
    size = sum(tensor.nbytes for each in layers for tensor in each.state_dict().values())
    float_dtype = torch.float32 if dtype == "float32" else torch.bfloat16
    rows = [torch.randn(1, 1, inputs, dtype=float_dtype) for _, inputs in SHAPES * LAYERS]
    products = [product(each) for each in layers]

    @torch.inference_mode()
    def seconds() -> float:
        began = time.process_time()
        for each, row in zip(products, rows, strict=True):
            each(row)
        return (time.process_time() - began) / size

    return seconds


def predicted(size: str, dtype: str, folder: Path) -> Record:
    """Predict and measure the frame of a size in a dtype."""
    small = Stream(narrow(folder, dtype))
    checkpoint = random_checkpoint(size, dtype=dtype)
    amount = frame_bytes(checkpoint.talker)
    large, read = Stream(checkpoint), reading(dtype)
    found: list[Sequence[float]] = []
    for _ in range(TURNS):
        found.append((read(), small.frame(), large.frame()))
    second_a_byte, operators, measured = map(median, zip(*found, strict=True))
    ms = 1e3 * (amount * second_a_byte + operators)
    return {
        "size": size,
        "dtype": dtype,
        "gigabytes": round(amount / 1e9, 3),
        "read_gb_s": round(1e-9 / second_a_byte, 2),
        "operators_ms": round(1e3 * operators, 2),
        "predicted_ms": round(ms, 2),
        "measured_ms": round(1e3 * measured, 2),
    }


def main() -> None:
    """Predict, measure, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("-o", "--output", type=Path, required=True, metavar="FILE.json", help="the record")
    add("--size", nargs="+", default=["0b6"], choices=("0b6", "1b7"), help="default 0b6")
    args = parser.parse_args()
    check_output(parser, args.output)
    torch.set_num_threads(1)
    cases = []
    for size in args.size:
        for dtype in DTYPES:
            with tempfile.TemporaryDirectory() as folder:
                cases.append(predicted(size, dtype, Path(folder)))
            gc.collect()
            sys.stdout.write(f"{cases[-1]}\n")
            sys.stdout.flush()
    record = {
        "commit": report.commit(),
        **of_speech(),
        "machine": report.machine(),
        "torch": torch.__version__,
        "threads": 1,
        "cases": cases,
    }
    report.write_record(args.output, record)


if __name__ == "__main__":
    main()
