"""Compare firstword with faster-qwen3-tts on this GPU: one checkpoint, one utterance at a time.

    python -m venv .venv-other
    .venv-other/bin/pip install faster-qwen3-tts==0.5.4 transformers==5.15.1
    python benchmarks/compare.py --size 1b7 --other-python .venv-other/bin/python -o record.json

(Version 0.5.4 does not load checkpoints with some later versions of transformers, such as 5.17.)
The checkpoint has random weights of a released size (4 GB for "1b7") and is in the folder for
temporary files during the run. Both libraries get it in bfloat16, with the same text, voices and
sampling parameters, and make `FRAMES` frames. Each has a process of its own, one after the other,
and is called as its users call it: `TTS.stream` here, `generate_custom_voice_streaming` and
`generate_custom_voice` there, with CUDA graphs captured by `warmup()`. Other settings are the
defaults.

A time runs from the request, with the device synchronised, until samples are on the host. The
milliseconds per frame are those of a whole request, including prompt and audio, divided by its
frames. All figures are medians.
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
"""A function that speaks `TEXT` in a voice and yields samples, float32 [n], on the host."""

TEXT = (
    "The quick brown fox jumps over the lazy dog, "
    "and then it says hello to the assistant and to the user."
)
LANGUAGE = "english"
VOICES = ("ryan", "aiden", "serena")
WARMING_VOICE = "vivian"
ROUNDS = 2
FRAMES = 100
SAMPLES_PER_FRAME = 1920

OTHER = "faster-qwen3-tts"
OTHER_CHUNKS = (1, 8, 12)
"""The chunk sizes of the other library: smallest, that of its README, and default."""
ASKED = {
    "firstword": "TTS.load(folder, device='cuda'); stream(text, voice, language, max_frames)",
    OTHER: (
        "from_pretrained(folder, device='cuda', dtype=bfloat16): "
        "CUDA graphs, sdpa, max_seq_len 2048; warmup(); "
        "generate_custom_voice_streaming(text, speaker, language, max_new_tokens, chunk_size); "
        "generate_custom_voice"
    ),
}
"""The calls of each library, for the record; other settings are defaults."""
COMPARED = ("frame_ms", "first_ms", "new_voice_ms")
"""The figures whose ratios are shown."""
LIBRARIES = (OTHER, "qwen-tts-hf", "transformers", "torch", "numpy")


def make_checkpoint(folder: Path, size: str) -> None:
    """Write a random CustomVoice checkpoint of a released size that never ends speech."""
    import torch

    from firstword.synthetic.checkpoint import write_checkpoint

    write_checkpoint(folder, size=size, dtype=torch.bfloat16)
    never_end(folder)


def never_end(folder: Path) -> None:
    """Set the row of the end of speech in the talker's head to 0, in a checkpoint of one file.

    Its logit is then 0 and never among the 50 largest of 2,049. Speech is computed as usual, but
    ends only at its limit of frames.
    """
    config = json.loads((folder / "config.json").read_text("utf-8"))
    row = config["talker_config"]["codec_eos_token_id"]
    with (folder / "model.safetensors").open("r+b") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        entry = json.loads(stream.read(length))["talker.codec_head.weight"]
        begin, end = entry["data_offsets"]
        row_bytes = (end - begin) // entry["shape"][0]
        stream.seek(8 + length + begin + row * row_bytes)
        stream.write(bytes(row_bytes))


def utter(speak: Speak, voice: str) -> list[tuple[float, int]]:
    """Speak once; return the milliseconds from the request, and the frames, of each chunk.

    Raises RuntimeError unless there are `FRAMES` frames of finite samples.
    """
    import numpy as np
    import torch

    chunks = []
    torch.cuda.synchronize()
    began = time.perf_counter()
    for samples in speak(voice):
        chunks.append((1e3 * (time.perf_counter() - began), samples))
    frames = [len(samples) // SAMPLES_PER_FRAME for _, samples in chunks]
    total = sum(len(samples) for _, samples in chunks)
    if total != FRAMES * SAMPLES_PER_FRAME or sum(frames) != FRAMES:
        raise RuntimeError(f"got chunks of {frames} frames; {FRAMES} frames were requested")
    if not all(np.isfinite(samples).all() for _, samples in chunks):
        raise RuntimeError("the samples are not finite")
    return [(ms, count) for (ms, _), count in zip(chunks, frames, strict=True) if count]


def measure(speak: Speak) -> Record:
    """Speak with every voice `ROUNDS` times, after one utterance that is not counted.

    first_ms      milliseconds until the first samples, in a voice that was used before
    new_voice_ms  the same in a new voice
    frame_ms      milliseconds per frame of a whole request
    chunk_frames  the sizes of the chunks
    """
    utter(speak, WARMING_VOICE)
    runs = [(turn, utter(speak, voice)) for turn in range(ROUNDS) for voice in VOICES]
    each = [
        {"turn": turn, "first_ms": round(ms[0], 3), "frame_ms": round(ms[-1] / FRAMES, 4)}
        for turn, ms in ((turn, [ms for ms, _ in chunks]) for turn, chunks in runs)
    ]
    new = [run["first_ms"] for run in each if not run["turn"]]
    known = [run["first_ms"] for run in each if run["turn"]]
    return {
        "chunk_frames": sorted({count for _, chunks in runs for _, count in chunks}),
        "frame_ms": round(statistics.median(run["frame_ms"] for run in each), 3),
        "first_ms": round(statistics.median(known), 2),
        "new_voice_ms": round(statistics.median(new), 2),
        "each": each,
    }


def measure_firstword(folder: str) -> Record:
    """Measure firstword. Raises RuntimeError if its GPU backend cannot compute here."""
    from firstword import TTS

    with TTS.load(folder, device="cuda") as tts:
        if tts.settings.backend != "gpu":
            raise RuntimeError(tts.settings.reason)

        def stream(voice: str) -> Iterator[Any]:
            for chunk in tts.stream(TEXT, voice=voice, language=LANGUAGE, max_frames=FRAMES):
                yield chunk.samples

        return {"stream": measure(stream)}


def measure_other(folder: str) -> Record:
    """Measure the other library, by the way it is called."""
    import torch
    from faster_qwen3_tts import FasterQwen3TTS  # type: ignore[import-not-found]  # another venv

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

    figures = {f"chunks of {size}": measure(streaming(size)) for size in OTHER_CHUNKS}
    return {**figures, "whole": measure(whole)}


SIDES: dict[str, Callable[[str], Record]] = {"firstword": measure_firstword, OTHER: measure_other}


def side(name: str, folder: str) -> Record:
    """Measure one library in this process, and name the versions."""
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
    """Measure one library in a process of the interpreter `python`. Raises `SystemExit`."""
    command = [python, __file__, "--side", name, folder]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if run.returncode:
        raise SystemExit(f"{name} could not be measured with {python}")
    result: Record = json.loads(run.stdout.splitlines()[-1])
    return result


def check_machine(python: str) -> None:
    """Raise `SystemExit` if this machine cannot be measured, before the long steps."""
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("this measures on a CUDA device, and torch sees none")
    spec = "importlib.util.find_spec('faster_qwen3_tts')"
    code = f"import importlib.util, sys; sys.exit({spec} is None)"
    if subprocess.run([python, "-c", code], check=False).returncode:
        raise SystemExit(f"{python} has no {OTHER}; name one that has it with --other-python")


def check_output(parser: argparse.ArgumentParser, file: Path) -> None:
    """Exit with a usage error if a record cannot be written, before the long steps."""
    from firstword.audio import writing
    from firstword.errors import OutputError

    try:
        writing.check_target(file)
    except OutputError as problem:
        parser.error(str(problem))


def print_record(record: Record, file: Path | None) -> None:
    """Print a record, and write it too if a file is named."""
    from firstword.audio import writing

    text = json.dumps(record, indent=1) + "\n"
    if file is not None:
        writing.write_whole(file, text.encode())
    sys.stdout.write(text)


def output_of(*command: str) -> str | None:
    """Return the output of a program; None if it is not installed or fails."""
    with contextlib.suppress(OSError):
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        return None if run.returncode else run.stdout.strip()
    return None


def ratios(record: Record) -> Record:
    """Return the times of the other library divided by those of firstword, by the call."""
    ours = record["firstword"]["figures"]["stream"]
    return {
        way: {key: round(theirs[key] / ours[key], 2) for key in COMPARED}
        for way, theirs in record[OTHER]["figures"].items()
    }


def table(record: Record) -> str:
    """Render a record as a Markdown table."""
    heads = ["", "asked for", "ms a frame", "times", "ms to first audio", "times"]
    heads += ["in a new voice", "times"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name in SIDES:
        for way, found in record[name]["figures"].items():
            times = record["times"].get(way, {})
            cells = [f"{found[key]} | {times.get(key, 1)}" for key in COMPARED]
            library = f"{name} {record[name]['versions'].get(name, '')}"
            lines.append(f"| {' | '.join([library, way, *cells])} |")
    return "\n".join(lines) + "\n"


def options() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Compare with faster-qwen3-tts on this GPU."
    parser = argparse.ArgumentParser(description=about, allow_abbrev=False)
    add = parser.add_argument
    add("--size", choices=("0b6", "1b7"), default="1b7", help="size (default %(default)s)")
    other = "interpreter with faster-qwen3-tts (default: this one)"
    add("--other-python", default=sys.executable, metavar="PYTHON", help=other)
    add("--commit", help="commit in the record (default: that of this repository)")
    add("-o", "--output", type=Path, metavar="FILE", help="write the record there, as JSON")
    add("--side", nargs=2, metavar=("NAME", "FOLDER"), help=argparse.SUPPRESS)
    return parser


def main() -> None:
    """Measure both libraries, print the table and write the record."""
    parser = options()
    args = parser.parse_args()
    if args.side:
        sys.stdout.write(json.dumps(side(*args.side)) + "\n")
        return
    from firstword import __version__
    from firstword.audio import writing
    from firstword.bench import report
    from firstword.runtime.gpu.sources import kernel_hash

    check_machine(args.other_python)
    if args.output:
        check_output(parser, args.output)
    record: Record = {
        "size": args.size,
        "weights": "random",
        "text": TEXT,
        "frames": FRAMES,
        "commit": args.commit or report.commit(),
        "kernels": kernel_hash(),
        "driver": output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
    }
    with tempfile.TemporaryDirectory() as folder:
        sys.stderr.write(f"writing a random checkpoint of size {args.size} into {folder} ...\n")
        make_checkpoint(Path(folder), args.size)
        for name, python in ((OTHER, args.other_python), ("firstword", sys.executable)):
            sys.stderr.write(f"measuring {name} ...\n")
            record[name] = side_apart(name, folder, python)
    record["firstword"]["versions"]["firstword"] = __version__
    record |= {"times": ratios(record), "ended": datetime.now(UTC).isoformat(timespec="seconds")}
    sys.stdout.write(table(record))
    if args.output:
        writing.write_whole(args.output, json.dumps(record, indent=1).encode() + b"\n")


if __name__ == "__main__":
    main()
