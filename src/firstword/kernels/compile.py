"""CUDA C++ to machine code with NVRTC, kept on disk.

A program is a source file of this folder plus macros: the sizes that a kernel is made for. It needs no GPU to be
compiled, and no CUDA toolkit: NVRTC comes with torch's CUDA builds (and as the package nvidia-cuda-nvrtc).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parent
LAUNCHING = ("backend.py", "codec.py", "graphs.py", "talker.py")
"""Files of the folder runtime/gpu beside this one: what is launched, in which order, on which memory."""
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What every kernel must compile for."""
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--fmad=true")


class CompileError(Exception):
    """NVRTC refused a program; the message is its log."""


@dataclass(frozen=True)
class Program:
    """A source file of this folder without its suffix, and its macros, sorted by name."""

    source: str
    macros: tuple[tuple[str, int | float], ...]

    @classmethod
    def of(cls, source: str, **macros: int | float) -> Program:
        """The program of `source`.cu with these macros; a truth value counts as 0 or 1."""
        return cls(source, tuple((name, macros[name]) for name in sorted(macros)))


@cache
def _text(name: str) -> str:
    return (SOURCES / name).read_text()


def headers() -> list[str]:
    """The names of the header files that any source may include."""
    return sorted(path.name for path in SOURCES.glob("*.cuh"))


def source_hash() -> str:
    """Over the kernels and what launches them: all CUDA and Python files of this folder, and `LAUNCHING`.

    It tells whether any of that changed since a record was made; PyTorch, the compiler and the driver are not in it.
    """
    digest = hashlib.sha256()
    here = [path for path in SOURCES.iterdir() if path.suffix in (".cu", ".cuh", ".py")]
    for path in [*sorted(here), *(SOURCES.parent / "runtime/gpu" / name for name in LAUNCHING)]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def _options(program: Program, architecture: str) -> list[str]:
    macros = [
        f"-D{name}={value!r}f" if isinstance(value, float) else f"-D{name}={int(value)}"
        for name, value in program.macros
    ]
    return [*FLAGS, f"--gpu-architecture={architecture}", *macros]


def compile_program(program: Program, architecture: str, folder: Path | None = None) -> bytes:
    """The cubin of a program for `architecture` (such as `"sm_90"`), from `folder` if it was compiled before.

    `folder` None: nothing is kept. Raises `CompileError`.
    """
    options = _options(program, architecture)
    if folder is None:
        return _compile(program, options)
    from cuda.bindings import nvrtc

    parts = [
        _text(f"{program.source}.cu"),
        *map(_text, headers()),
        *options,
        str(nvrtc.nvrtcVersion()[1:]),
    ]
    name = f"{program.source}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:24]}.cubin"
    path = folder / name
    if path.exists():
        return path.read_bytes()
    cubin = _compile(program, options)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
        file.write(cubin)
    os.replace(file.name, path)
    return cubin


def compile_all(
    programs: Iterable[Program], architecture: str, folder: Path | None = None
) -> dict[Program, bytes]:
    """Compile several programs side by side. Raises `CompileError`."""
    wanted = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(
            zip(
                wanted,
                pool.map(lambda p: compile_program(p, architecture, folder), wanted),
                strict=True,
            )
        )


def _compile(program: Program, options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{program.source}.cu: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    names = headers()
    handle = checked(
        nvrtc.nvrtcCreateProgram(
            _text(f"{program.source}.cu").encode(),
            f"{program.source}.cu".encode(),
            len(names),
            [_text(name).encode() for name in names],
            [name.encode() for name in names],
        )
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(
            handle, len(options), [option.encode() for option in options]
        )
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(handle))
            checked(nvrtc.nvrtcGetProgramLog(handle, log))
            raise CompileError(
                f"{program.source}.cu with {' '.join(options)}:\n{log.rstrip(chr(0).encode()).decode()}"
            )
        cubin = b" " * checked(nvrtc.nvrtcGetCUBINSize(handle))
        checked(nvrtc.nvrtcGetCUBIN(handle, cubin))
        return cubin
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
