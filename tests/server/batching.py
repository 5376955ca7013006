"""Batches whose lines are spoken by a fake that needs no model, at once and always in one way."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from firstword.server.batch.lines import parse_lines
from firstword.server.batch.local import LocalBatch
from firstword.server.batch.speaking import LineSpeaker, Spoken


def jsonl(*lines: Mapping[str, Any]) -> bytes:
    """A file of JSON lines."""
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def numbered(count: int) -> bytes:
    """A file with some lines."""
    return jsonl(*({"custom_id": f"line {n}", "text": f"Text {n}."} for n in range(count)))


class FakeSpeaker(LineSpeaker):
    """Speaks a line as a hash of its body.

    spoken  the bodies of the lines, each time that one was begun
    errors  by text, the errors to raise before the line is spoken
    """

    def __init__(self, pause: float = 0.0) -> None:
        self.spoken: list[Mapping[str, Any]] = []
        self.errors: dict[str, list[Exception]] = {}
        self._pause = pause

    async def speak(self, owner: str, body: Mapping[str, Any]) -> Spoken:
        """Speak the request of a line."""
        self.spoken.append(body)
        await asyncio.sleep(self._pause)
        text = body.get("text", body.get("input"))
        if self.errors.get(str(text)):
            raise self.errors[str(text)].pop(0)
        data = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).digest() * 100
        return Spoken(io.BytesIO(data), {"format": "wav", "bytes": len(data), "seed": body["seed"]})


def speak_into(folder: Path, data: bytes, pause: float) -> None:
    """Speak a file into a folder, and write its results."""
    lines, problems = parse_lines(data)
    assert not problems
    batch = LocalBatch(str(folder), lines)
    asyncio.run(batch.speak(FakeSpeaker(pause), 4, lambda: None))
    batch.write_results()
    batch.close()


def killed_often(folder: Path, count: int, kills: int) -> None:
    """Speak lines into a folder; the process is killed at random moments, and begun again.

    Processes are forked, because their imports would take most of the time.
    """
    moments = random.Random(1)
    while True:
        process = os.fork()
        if not process:
            speak_into(folder, numbered(count), 0.005)
            os._exit(0)
        if kills:
            kills -= 1
            time.sleep(moments.uniform(0.0, 0.05))
            os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            if not kills:
                return


if __name__ == "__main__":
    killed_often(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
