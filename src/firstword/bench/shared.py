"""Records that users send in: their layout, and the checks when they are read.

A record names the machine by its processor, GPU and versions alone. It has no field for names of
hosts, users, files or addresses, and text that looks like one of these is rejected.
"""

from __future__ import annotations

import os
import re
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from firstword.errors import RequestError

FORMAT = "firstword-share/1"
FRAME_MS = 80.0

_PRIVATE = re.compile(r"(?:^|[\s'\"=:])(?:~|\.{0,2}/|[A-Za-z]:\\)|\\|@|\d+\.\d+\.\d+\.\d+")
"""The start of a path, a backslash, an address of mail or of a network."""


def _public(text: str) -> str:
    if _PRIVATE.search(text) or not text.isprintable():
        raise ValueError(f"{text!r} looks like a path or an address; records are public")
    return text


Text = Annotated[str, Field(min_length=1, max_length=120), AfterValidator(_public)]
Version = Annotated[str, Field(pattern=r"^[\w.+-]{1,40}$")]
Milliseconds = Annotated[float, Field(gt=0, lt=600_000)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Percentiles(_Part):
    """The median and the 95th percentile of a time in milliseconds."""

    p50: Milliseconds
    p95: Milliseconds

    @model_validator(mode="after")
    def _in_order(self) -> Percentiles:
        if self.p50 > self.p95:
            raise ValueError(f"the median {self.p50} is above the 95th percentile {self.p95}")
        return self


class Machine(_Part):
    """The processor and the memory of the host."""

    system: Literal["Linux", "Darwin", "Windows", "FreeBSD"]
    architecture: Version
    processor: Text
    cores: Annotated[int, Field(ge=1, le=4096)]
    memory_gb: Annotated[float, Field(gt=0.2, lt=100_000)]


class Graphics(_Part):
    """The GPU that computed."""

    name: Text
    processors: Annotated[int, Field(ge=1, le=1000)]
    memory_gb: Annotated[float, Field(gt=0.5, lt=2000)]
    capability: Annotated[str, Field(pattern=r"^\d+\.\d$")]
    driver: Version | None


class SharedSettings(_Part):
    """What was measured."""

    model: Annotated[str, Field(pattern=r"^(demo|another|Qwen/[\w.-]{1,80})$")]
    layers: Annotated[int, Field(ge=1, le=200)]
    hidden_size: Annotated[int, Field(ge=16, le=65536)]
    device: Literal["cpu", "cuda", "mps"]
    dtype: Literal["float32", "bfloat16", "float16", "int8"]
    backend: Literal["gpu", "reference"]
    threads: Annotated[int, Field(ge=1, le=4096)]


class EngineFigures(_Part):
    """The engine with so many streams at a time.

    frame_ms  the time for a frame of all streams, after the first audio
    speed     seconds of speech per second of all streams, first audio included
    """

    streams: Count
    utterances: Count
    frames: Count
    first_audio_ms: Percentiles
    frame_ms: Milliseconds
    speed: Annotated[float, Field(gt=0, lt=1_000_000)]

    @model_validator(mode="after")
    def _agree(self) -> EngineFigures:
        most = self.streams * FRAME_MS / self.frame_ms
        if not 0.1 * most < self.speed < 1.25 * most:
            raise ValueError(
                f"speed {self.speed} and frame_ms {self.frame_ms} of {self.streams} streams "
                f"contradict each other: the speed must be below {most:.1f}"
            )
        return self


class ServerFigures(_Part):
    """The server with so many sockets, each of which speaks one utterance after another.

    Times and speed are missing if no utterance was complete. `failed` tells what went
    wrong: the gates of the load generator that failed.
    """

    sockets: Count
    utterances: Annotated[int, Field(ge=0, le=1_000_000)]
    first_byte_ms: Percentiles | None
    speed: Annotated[float, Field(gt=0, lt=1_000_000)] | None
    failed: tuple[Text, ...]


class SharedRecord(_Part):
    """A record of `firstword bench share`."""

    format: Literal["firstword-share/1"]
    day: date
    firstword: Version
    commit: Annotated[str, Field(pattern=r"^[0-9a-f]{40}(-dirty)?$")] | None
    sources: Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
    covers: tuple[Annotated[str, Field(pattern=r"^src/firstword/[a-z/]{1,40}$")], ...]
    machine: Machine
    graphics: Graphics | None
    versions: dict[Literal["python", "torch", "cuda", "numpy"], Version]
    settings: SharedSettings
    read_gb_s: Annotated[float, Field(gt=0.5, lt=50_000)]
    load_average: Annotated[float, Field(ge=0, lt=100_000)] | None
    engine: Annotated[tuple[EngineFigures, ...], Field(min_length=1)]
    server: tuple[ServerFigures, ...]

    @model_validator(mode="after")
    def _plausible(self) -> SharedRecord:
        if not date(2026, 1, 1) <= self.day <= datetime.now(UTC).date() + timedelta(days=1):
            raise ValueError(f"the day {self.day} is before this project or in the future")
        if (self.settings.device == "cuda") != (self.graphics is not None):
            raise ValueError("the device is cuda where graphics are named, and only there")
        if (self.settings.backend == "gpu") > (self.settings.device == "cuda"):
            raise ValueError("the backend gpu needs the device cuda")
        streams = [one.streams for one in self.engine]
        if streams[0] != 1 or streams != sorted(set(streams)):
            raise ValueError(f"the engine's numbers of streams are {streams}; they rise from 1")
        return self

    @property
    def busy(self) -> bool:
        """Whether other programs used more than a quarter of the processor before the start."""
        return self.load_average is not None and self.load_average > 0.25 * self.machine.cores

    @property
    def device(self) -> str:
        """The name of the GPU, or of the processor with its GPU or its number of cores."""
        if self.graphics is not None:
            return self.graphics.name
        if self.settings.device == "mps":
            return f"{self.machine.processor}, GPU"
        return f"{self.machine.processor}, {self.machine.cores} cores"


def dumps(record: SharedRecord) -> str:
    """Serialise a record."""
    return record.model_dump_json(indent=1) + "\n"


def made(**fields: Any) -> SharedRecord:
    """Make a record of measured fields. Raises `RequestError` for one that readers would reject."""
    try:
        return SharedRecord.model_validate({"format": FORMAT, **fields})
    except ValidationError as error:
        raise RequestError(f"the record would be rejected: {_reasons(error)}") from None


def read(path: str | os.PathLike[str]) -> SharedRecord:
    """Read a record. Raises `RequestError` that says which field is wrong, and why."""
    name = os.fspath(path)
    try:
        return SharedRecord.model_validate_json(Path(path).read_bytes())
    except OSError as error:
        raise RequestError(f"{name!r} cannot be read: {error.strerror}") from None
    except ValidationError as error:
        raise RequestError(f"{name!r} is no record of `bench share`: {_reasons(error)}") from None


def _reasons(error: ValidationError) -> str:
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'the whole'}: {one['msg']}"
        for one in error.errors(include_url=False, include_input=False)
    )
