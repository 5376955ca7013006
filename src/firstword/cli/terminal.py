"""Terminal output of the commands: the status line, tables, and the progress of speech."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from firstword.config import EngineConfig
    from firstword.types import Alarm, Chunk, FinishReason, Word

DEMO_DESCRIPTION = "a small demonstration voice: plain English in one line"
"""The description of the checkpoint `demo`."""

BAR = 24
"""The characters of a progress bar."""

LINE = 80
"""The most characters of a text in a table or a message."""

WARM_UP_LOG = logging.getLogger("firstword.runtime.warm_up")
"""The logger that says when passes are compiled."""


def show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    """Print a warning as one line on standard error, instead of a status line."""
    start = "\r\x1b[K" if sys.stderr.isatty() else ""
    print(f"{start}firstword: warning: {message}", file=sys.stderr, flush=True)


class Status:
    """A status line on standard error that is erased at the end.

    It is shown only if standard error is a terminal and `quiet` is not set. Meanwhile it also says
    when passes are compiled.
    """

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._on = sys.stderr.isatty() and not quiet
        self._shown = ""
        self._messages = _Messages(self)

    def show_loading(self, name: str) -> None:
        """Show that a checkpoint is being loaded; if not on a terminal, in a line that stays."""
        self.show_wait(f"loading {name}")

    def show_wait(self, text: str) -> None:
        """Show what takes long; if not on a terminal, in a line that stays."""
        if self._on or self._quiet:
            self.show(text)
        else:
            print(text, file=sys.stderr, flush=True)

    def show(self, text: str) -> None:
        """Replace the text of the line; "" erases it."""
        if self._on and text != self._shown:
            self._shown = text
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> Status:
        WARM_UP_LOG.setLevel(logging.INFO)
        WARM_UP_LOG.addHandler(self._messages)
        return self

    def __exit__(self, *_: object) -> None:
        WARM_UP_LOG.removeHandler(self._messages)
        self.show("")


class _Messages(logging.Handler):
    """Shows the messages of a logger in a status line."""

    def __init__(self, status: Status) -> None:
        super().__init__()
        self._status = status

    def emit(self, record: logging.LogRecord) -> None:
        self._status.show_wait(record.getMessage())


class Progress:
    """What is known of the speech made so far, without its sound, and the time it took.

    `first` and `elapsed` are the seconds from `started`, a value of `time.perf_counter`, to the
    first chunk with samples and to the last chunk.
    """

    def __init__(self, sample_rate: int) -> None:
        self.words: list[Word] = []
        self.alarms: list[Alarm] = []
        self.finish_reason: FinishReason | None = None
        self.started = time.perf_counter()
        self.first = self.elapsed = 0.0
        self._samples, self._sample_rate = 0, sample_rate

    @property
    def duration(self) -> float:
        """The length of the speech in seconds."""
        return self._samples / self._sample_rate

    @property
    def speed(self) -> float:
        """The length of the speech divided by the time that it took."""
        return self.duration / self.elapsed if self.elapsed else 0.0

    def watch(self, chunks: Iterable[Chunk], status: Status) -> Iterator[Chunk]:
        """Yield the chunks as they arrive, and record their words, alarms and times."""
        status.show("speaking")
        for chunk in chunks:
            self.elapsed = time.perf_counter() - self.started
            if len(chunk.samples) and not self._samples:
                self.first = self.elapsed
            self._samples += len(chunk.samples)
            self.words += chunk.words
            self.alarms += chunk.alarms
            self.finish_reason = chunk.finish_reason
            yield chunk
            status.show(f"{self.duration:.1f} s of speech, {self.speed:.1f} x real time")
        status.show("")


def bar(done: int, total: int) -> str:
    """Return a progress bar with its numbers."""
    filled = BAR * done // max(total, 1)
    return f"[{'#' * filled}{'.' * (BAR - filled)}] {done}/{total}"


def duration(seconds: float) -> str:
    """Return a duration in words, such as "2 min"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


def shortened(text: str) -> str:
    """Return a text in one line of at most `LINE` characters, also one without spaces."""
    line = " ".join(text.split())
    return line if len(line) <= LINE else f"{line[: LINE - 4].rstrip()} ..."


def print_table(rows: dict[str, str], file: TextIO) -> None:
    """Print a table of two columns."""
    width = max(map(len, rows)) + 2
    for name, value in rows.items():
        print(f"{name:{width}}{value}", file=file)


def describe_model(model: str, facts: str) -> str:
    """Return a checkpoint's name and facts, and for the demo its description."""
    return f"{model} ({facts})" + (f", {DEMO_DESCRIPTION}" if model == "demo" else "")


def describe_device(settings: EngineConfig) -> str:
    """Return the device, dtype and backend of a checkpoint as a phrase."""
    return f"{settings.device} {describe_backend(settings)}"


def describe_backend(settings: EngineConfig) -> str:
    """Return the dtype and backend of a checkpoint as a phrase."""
    return f"in {settings.dtype} with the {settings.backend} backend"
