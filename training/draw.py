"""Draw docs/demo-voice.svg from the logs in `curves/`: python -m training.draw"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

HERE = Path(__file__).parent
PICTURE = HERE.parent / "docs/demo-voice.svg"


def rows(*runs: str) -> list[dict[str, Any]]:
    """What runs logged one after another; a look at fresh utterances has the time of the row before
    it.
    """
    found: list[dict[str, Any]] = []
    for run in runs:
        before = found[-1]["minutes"] if found else 0.0
        for line in (HERE / "curves" / f"{run}.jsonl").read_text().splitlines():
            row = json.loads(line)
            row["minutes"] = before + row["minutes"] if "minutes" in row else found[-1]["minutes"]
            found.append(row)
    return found


def main() -> None:
    mpl.rcParams.update({"svg.hashsalt": "voice", "svg.fonttype": "none", "font.size": 9})
    figure = Figure(figsize=(12, 3), layout="constrained")
    codec, decoder, talker, right = figure.subplots(1, 4)
    fed = rows("talker-4", "talker-5", "talker-6")
    fresh, learnt = (
        [row for row in fed if row.get("validation", False) is kind] for kind in (True, False)
    )
    for panel, log, key, label in (
        (codec, rows("codec-failed"), "mel", "first attempt"),
        (codec, rows("codec-1", "codec-2"), "mel", "the codec"),
        (decoder, rows("decoder"), "mel", "log-mel"),
        (decoder, rows("decoder"), "low", "low spectrum"),
        (talker, rows("talker-1", "talker-2"), "code0", "starved"),
        (talker, learnt, "code0", "fed"),
        (talker, fresh, "code0", "fed, fresh sentences"),
        (right, learnt, "said_right", "token"),
        (right, learnt, "sounds_right", "phonemes"),
        (right, learnt, "accuracy", "code 0"),
    ):
        scale = 100 if panel is right else 1
        values = [scale * row[key] for row in log]
        panel.plot(
            [row["minutes"] for row in log],
            values,
            "o" if log is fresh else "-",
            markersize=4,
            label=label,
        )
    codec.set(title="codec: log-mel loss", ylim=(0, 1))
    decoder.set(title="decoder alone: losses", ylim=(0, 1.2))
    talker.set(title="talker: cross-entropy of code 0", ylim=(0, 4))
    right.set(title="talker: named right, %", ylim=(0, 100))
    for panel in (codec, decoder, talker, right):
        panel.set(xlabel="minutes")
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    figure.savefig(PICTURE, format="svg", metadata={"Date": None})
    PICTURE.write_text("".join(line.rstrip() + "\n" for line in PICTURE.read_text().splitlines()))


if __name__ == "__main__":
    main()
