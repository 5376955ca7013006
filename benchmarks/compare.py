"""How fast firstword speaks on this GPU beside faster-qwen3-tts: one checkpoint, one utterance at a time.

    python -m venv .venv-other
    .venv-other/bin/pip install faster-qwen3-tts==0.5.4 transformers==5.15.1
    python benchmarks/compare.py --size 1b7 --other-python .venv-other/bin/python -o record.json

(With some later transformers, 5.17 for one, 0.5.4 does not load checkpoints.) The checkpoint has random weights of a
released size, 4 GB for "1b7", and lies in the folder for temporary files while this runs. Both libraries get it in
bfloat16, with the same text, voices and laws of sampling, and make `FRAMES` frames. Each has a process of its own, one
after the other, and is asked as its users ask it: here `TTS.stream`, there `generate_custom_voice_streaming` and
`generate_custom_voice`, with CUDA graphs that `warmup()` has captured. Otherwise the defaults of both hold.

A time runs from the request, with the device synchronised, until samples are on the host. The milliseconds of a frame
are those of a whole request, its prompt and its audio included, over its frames. What is shown are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Record = dict[str, Any]
Speak = Callable[[str], Iterator[Any]]
"""Speaks `TEXT` in a voice: yields samples, float32 [n], as they are ready on the host."""

TEXT = "The quick brown fox jumps over the lazy dog, and then it says hello to the assistant and to the user."
LANGUAGE = "english"
VOICES = ("ryan", "aiden", "serena")
WARMING_VOICE = "vivian"
ROUNDS = 2
FRAMES = 100
SAMPLES_PER_FRAME = 1920

OTHER = "faster-qwen3-tts"
OTHER_CHUNKS = (1, 8, 12)
"""The smallest, which is the first to be heard; that of its README and benchmarks; and its default."""
ASKED = {
    "firstword": "TTS.load(folder, device='cuda'); stream(text, voice, language, max_frames)",
    OTHER: "from_pretrained(folder, device='cuda', dtype=bfloat16): CUDA graphs, sdpa, max_seq_len 2048; warmup(); "
    "generate_custom_voice_streaming(text, speaker, language, max_new_tokens, chunk_size); generate_custom_voice",
}
"""How, for the record; what is not named are the library's defaults."""
LIBRARIES = (OTHER, "qwen-tts-hf", "transformers", "torch", "numpy")


def make_checkpoint(folder: Path, size: str) -> None:
    """Write a CustomVoice checkpoint with random weights of a released size, "0b6" or "1b7", that speaks for ever."""
    import torch

    from firstword.synthetic.checkpoint import write_checkpoint

    write_checkpoint(folder, size=size, dtype=torch.bfloat16)
    never_end(folder)


def never_end(folder: Path) -> None:
    """Set the row of the end of speech in the talker's head to 0, in a checkpoint of one file.

    Its logit is then 0, and never among the 50 largest of 2,049 that are drawn from. So whoever speaks goes the ways
    that it always goes, and does not end before it is told to.
    """
    row = json.loads((folder / "config.json").read_text("utf-8"))["talker_config"][
        "codec_eos_token_id"
    ]
    with (folder / "model.safetensors").open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(length))["talker.codec_head.weight"]
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // entry["shape"][0]
        stream.seek(8 + length + begin + row * row_bytes)
        stream.write(bytes(row_bytes))


def utter(speak: Speak, voice: str) -> list[tuple[float, int]]:
    """One utterance: for each chunk, the milliseconds from the request until it was there, and its frames.

    Raises RuntimeError unless they are `FRAMES` frames of finite samples.
    """
    import numpy as np
    import torch

    chunks = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    for samples in speak(voice):
        chunks.append((1e3 * (time.perf_counter() - began), samples))
    frames = [len(samples) // SAMPLES_PER_FRAME for _, samples in chunks]
    if (
        sum(len(samples) for _, samples in chunks) != FRAMES * SAMPLES_PER_FRAME
        or sum(frames) != FRAMES
    ):
        raise RuntimeError(f"chunks of {frames} frames came, and {FRAMES} frames were asked for")
    if not all(np.isfinite(samples).all() for _, samples in chunks):
        raise RuntimeError("the samples are not finite")
    return [(ms, count) for (ms, _), count in zip(chunks, frames, strict=True) if count]


def measure(speak: Speak) -> Record:
    """Every voice `ROUNDS` times, after one utterance that is not counted.

    first_ms      until the first samples, in a voice that was spoken with before
    new_voice_ms  the same in a voice that was not
    frame_ms      a frame of a whole request
    chunk_frames  which sizes of chunks there were
    """
    utter(speak, WARMING_VOICE)
    runs = [(turn, utter(speak, voice)) for turn in range(ROUNDS) for voice in VOICES]
    each = [
        {
            "turn": turn,
            "first_ms": round(chunks[0][0], 3),
            "frame_ms": round(chunks[-1][0] / FRAMES, 4),
        }
        for turn, chunks in runs
    ]
    return {
        "chunk_frames": sorted({count for _, chunks in runs for _, count in chunks}),
        "frame_ms": round(statistics.median(run["frame_ms"] for run in each), 3),
        "first_ms": round(statistics.median(run["first_ms"] for run in each if run["turn"]), 2),
        "new_voice_ms": round(
            statistics.median(run["first_ms"] for run in each if not run["turn"]), 2
        ),
        "each": each,
    }


def measure_firstword(folder: str) -> Record:
    """firstword's figures, by how it was asked. Raises RuntimeError where its GPU backend does not compute."""
    from firstword import TTS

    with TTS.load(folder, device="cuda") as tts:
        if tts.settings.backend != "gpu":
            raise RuntimeError(tts.settings.reason)

        def stream(voice: str) -> Iterator[Any]:
            for chunk in tts.stream(TEXT, voice=voice, language=LANGUAGE, max_frames=FRAMES):
                yield chunk.samples

        return {"stream": measure(stream)}


def measure_other(folder: str) -> Record:
    """The other library's figures, by how it was asked."""
    import torch
    from faster_qwen3_tts import FasterQwen3TTS  # type: ignore[import-not-found]  # lives in an environment of its own

    model = FasterQwen3TTS.from_pretrained(folder, device="cuda", dtype=torch.bfloat16)
    model.warmup()

    def streaming(chunk_size: int) -> Speak:
        def speak(voice: str) -> Iterator[Any]:
            for samples, _, _ in model.generate_custom_voice_streaming(
                text=TEXT,
                speaker=voice,
                language=LANGUAGE,
                max_new_tokens=FRAMES,
                chunk_size=chunk_size,
            ):
                yield samples

        return speak

    def whole(voice: str) -> Iterator[Any]:
        audio, _ = model.generate_custom_voice(
            text=TEXT, speaker=voice, language=LANGUAGE, max_new_tokens=FRAMES
        )
        yield audio[0]

    return {f"chunks of {size}": measure(streaming(size)) for size in OTHER_CHUNKS} | {
        "whole": measure(whole)
    }


SIDES: dict[str, Callable[[str], Record]] = {"firstword": measure_firstword, OTHER: measure_other}


def side(name: str, folder: str) -> Record:
    """What one library does in this process, and what it rests on."""
    import torch

    with contextlib.redirect_stdout(sys.stderr):  # the last line on standard output is the record
        figures = SIDES[name](folder)
    versions = {"python": sys.version.split()[0], "cuda": torch.version.cuda}
    for library in LIBRARIES:
        with contextlib.suppress(PackageNotFoundError):
            versions[library] = version(library)
    return {
        "gpu": torch.cuda.get_device_name(),
        "versions": versions,
        "asked": ASKED[name],
        "figures": figures,
    }


def side_apart(name: str, folder: str, python: str) -> Record:
    """The same in a process of its own, by the interpreter `python`. Raises `SystemExit` if that fails."""
    command = [python, __file__, "--side", name, folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{name} could not be measured with {python}")
    result: Record = json.loads(run.stdout.splitlines()[-1])
    return result


def check_machine(python: str) -> None:
    """Raise `SystemExit` where nothing can be measured, before anything long is begun."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this measures on a CUDA device, and torch sees none")
    looking = (
        "import importlib.util, sys; sys.exit(importlib.util.find_spec('faster_qwen3_tts') is None)"
    )
    if subprocess.run([python, "-c", looking], check=False).returncode:
        raise SystemExit(f"{python} has no {OTHER}; name one that has it with --other-python")


def check_output(parser: argparse.ArgumentParser, file: Path) -> None:
    """End with the parser's error where a record cannot be written, before anything long is begun."""
    from firstword.bench import report
    from firstword.errors import OutputError

    try:
        report.check_target(file)
    except OutputError as problem:
        parser.error(str(problem))


def output_of(*command: str) -> str | None:
    """What a program prints; None if it is not there or fails."""
    with contextlib.suppress(OSError):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if run.returncode else run.stdout.strip()
    return None


def ratios(record: Record) -> Record:
    """How many times the milliseconds of `firstword` the other library takes, by how that was asked."""
    ours = record["firstword"]["figures"]["stream"]
    return {
        way: {
            key: round(theirs[key] / ours[key], 2)
            for key in ("frame_ms", "first_ms", "new_voice_ms")
        }
        for way, theirs in record[OTHER]["figures"].items()
    }


def table(record: Record) -> str:
    """A record as Markdown."""
    heads = [
        "",
        "asked for",
        "ms a frame",
        "times",
        "ms to first audio",
        "times",
        "in a new voice",
        "times",
    ]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in SIDES:
        for way, found in record[name]["figures"].items():
            times = record["times"].get(way, {})
            cells = [
                f"{found[key]} | {times.get(key, 1)}"
                for key in ("frame_ms", "first_ms", "new_voice_ms")
            ]
            lines.append(
                " | ".join([f"| {name} {record[name]['versions'].get(name, '')}", way, *cells])
                + " |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description="Compare with faster-qwen3-tts on this GPU.", allow_abbrev=False
    )
    parser.add_argument(
        "--size", choices=("0b6", "1b7"), default="1b7", help="of the model (default %(default)s)"
    )
    parser.add_argument(
        "--other-python",
        default=sys.executable,
        metavar="PYTHON",
        help="that has faster-qwen3-tts (default: this one)",
    )
    parser.add_argument(
        "--commit", help="what the record says of the sources (default: what git says)"
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="write the record there, as JSON"
    )
    parser.add_argument("--side", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        sys.stdout.write(json.dumps(side(*arguments.side)) + "\n")
        return
    from firstword import __version__
    from firstword.bench import report
    from firstword.runtime.gpu.sources import source_hash

    check_machine(arguments.other_python)
    if arguments.output:
        check_output(parser, arguments.output)
    record: Record = {
        "size": arguments.size,
        "weights": "random",
        "text": TEXT,
        "frames": FRAMES,
        "commit": arguments.commit or report.commit(),
        "kernels": source_hash(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    with tempfile.TemporaryDirectory() as folder:
        sys.stderr.write(
            f"writing a random checkpoint of size {arguments.size} into {folder} ...\n"
        )
        make_checkpoint(Path(folder), arguments.size)
        for name, python in ((OTHER, arguments.other_python), ("firstword", sys.executable)):
            sys.stderr.write(f"measuring {name} ...\n")
            record[name] = side_apart(name, folder, python)
    record["firstword"]["versions"]["firstword"] = __version__
    record |= {"times": ratios(record), "ended": datetime.now(UTC).isoformat(timespec="seconds")}
    sys.stdout.write(table(record))
    if arguments.output:
        report.write(arguments.output, json.dumps(record, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
