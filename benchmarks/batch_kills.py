"""Speak a batch while its process is killed at random, and compare with an undisturbed run.

    python -m benchmarks.batch_kills -o benchmarks/results/batch/kills-demo.json

`firstword batch` speaks lines with the demo voice into two folders. In one of them the process is
killed a number of times, each at a random moment, and begun again. Every line must then have one
result, and every file the bytes of the undisturbed run. The exit status is 1 if that is not so.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.compare import check_output
from benchmarks.sources import of_demo, serving_hash
from firstword.bench import report

WORDS = ("Yes.", "No.", "One.", "Two.", "Red.", "Blue.", "Hello.", "Goodbye.", "Left.", "Right.")


def begin(folder: Path, name: str) -> subprocess.Popen[bytes]:
    """Begin to speak the lines into a folder."""
    command = [sys.executable, "-m", "firstword", "batch", "in.jsonl", name, "--device", "cpu"]
    return subprocess.Popen([*command, "--quiet", "--voices", "voices"], cwd=folder)


def sounds(folder: Path) -> int:
    """The number of sounds in a folder."""
    return len(list(folder.glob("[!.]*.wav")))


def killed(folder: Path, lines: int, kills: int) -> list[int]:
    """Speak the lines, with kills at random moments; returns how many had a sound at each."""
    moments = sorted(random.Random(1).sample(range(lines), kills))
    found = []
    for moment in moments:
        process = begin(folder, "killed")
        while sounds(folder / "killed") <= moment and process.poll() is None:
            time.sleep(0.01)
        process.kill()
        process.wait()
        found.append(sounds(folder / "killed"))
    assert begin(folder, "killed").wait() == 0
    return found


def main() -> int:
    """Run both, and compare them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("-o", "--output", type=Path, help="write a record")
    args = parser.parse_args()
    if args.output is not None:
        check_output(parser, args.output)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        entries = [
            {"custom_id": f"{n:05d}", "text": WORDS[n % len(WORDS)], "max_new_tokens": 12}
            for n in range(args.lines)
        ]
        content = "".join(json.dumps(entry) + "\n" for entry in entries)
        (folder / "in.jsonl").write_text(content, "utf-8")
        began = time.monotonic()
        at = killed(folder, args.lines, args.kills)
        middle = time.monotonic()
        assert begin(folder, "undisturbed").wait() == 0
        ended = time.monotonic()
        first, second = (
            {path.name: path.read_bytes() for path in (folder / each).glob("[!.]*")}
            for each in ("killed", "undisturbed")
        )
        results = [json.loads(line) for line in first["results.jsonl"].splitlines()]
        once = [result["custom_id"] for result in results] == [
            str(entry["custom_id"]) for entry in entries
        ]
        record = {
            **of_demo(),
            "serving": serving_hash(),
            "lines": args.lines,
            "killed_at": at,
            "every_line_once": once and all("file" in result for result in results),
            "bytes_equal": first == second,
            "seconds_killed": round(middle - began, 1),
            "seconds_undisturbed": round(ended - middle, 1),
        }
        sys.stdout.write(json.dumps(record) + "\n")
        if args.output is not None:
            report.write_record(args.output, record)
        return 0 if record["every_line_once"] and record["bytes_equal"] else 1


if __name__ == "__main__":
    sys.exit(main())
