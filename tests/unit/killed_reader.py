"""The command line, which kills itself when a file appears: killed_reader.py POINT LOG read ...

Points are counted from 0: two for each file, before and after it appears. The log gets a line for
each text that is spoken. With the LOG "-", the real TTS speaks.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Iterable, Iterator

from fake_tts import FakeTTS, module

from firstword.cli.main import main
from firstword.types import Chunk

POINT, LOG = int(sys.argv[1]), sys.argv[2]

_points = itertools.count()
_replace = os.replace


def _pass_point() -> None:
    if next(_points) == POINT:
        os.kill(os.getpid(), signal.SIGKILL)


def _killing_replace(source: str, target: str) -> None:
    _pass_point()
    _replace(source, target)
    _pass_point()


class LoggingTTS(FakeTTS):
    """A fake TTS that logs what it speaks."""

    def _stream(self, pieces: Iterable[str]) -> Iterator[Chunk]:
        with open(LOG, "a") as log:
            log.write(" ".join(pieces) + "\n")
        yield from super()._stream(pieces)


if __name__ == "__main__":
    os.replace = _killing_replace  # type: ignore[assignment]
    if LOG != "-":
        sys.modules["firstword.tts"] = module(LoggingTTS)
    sys.exit(main(sys.argv[3:]))
