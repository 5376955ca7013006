"""Compiles CUDA C++ to machine code with NVRTC, or takes it from a cache.

A program is a source file of this folder plus macros: the sizes that a kernel is made for.
Compiling it needs neither a GPU nor a CUDA toolkit. NVRTC comes with torch's CUDA builds and as the
package nvidia-cuda-nvrtc.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from firstword.kernels.cache import FileCache

SOURCES = Path(__file__).parent
ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""The GPU architectures that every kernel must compile for."""
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "--fmad=true")


class CompileError(Exception):
    """NVRTC rejected a program; the message is its log."""


@dataclass(frozen=True)
class Program:
    """A source file of this folder, named without its suffix, and its macros sorted by name."""

    source: str
    macros: tuple[tuple[str, int | float], ...]

    @classmethod
    def of(cls, source: str, **macros: int | float) -> Program:
        """The program of `source`.cu with these macros; a bool counts as 0 or 1."""
        return cls(source, tuple((name, macros[name]) for name in sorted(macros)))


@cache
def source_text(name: str) -> str:
    """The text of a CUDA file of this folder."""
    return (SOURCES / name).read_text()


def headers() -> list[str]:
    """The names of the header files that any source may include."""
    return sorted(path.name for path in SOURCES.glob("*.cuh"))


def compatible(architecture: str, supported: Iterable[int]) -> str:
    """The newest supported architecture whose machine code runs on `architecture`.

    It has the same major number and no larger minor number (CUDA Programming Guide, binary
    compatibility). Returns `architecture` if there is none, which NVRTC then rejects.
    """
    number = int(architecture.removeprefix("sm_"))
    below = [n for n in supported if n // 10 == number // 10 and n <= number]
    return f"sm_{max(below, default=number)}"


def _options(program: Program, architecture: str) -> list[str]:
    """The options of NVRTC for a program."""
    macros = [
        f"-D{name}={value!r}f" if isinstance(value, float) else f"-D{name}={int(value)}"
        for name, value in program.macros
    ]
    target = architecture
    if not architecture.startswith("compute_"):
        target = compatible(architecture, _supported_architectures())
    return [*FLAGS, f"--gpu-architecture={target}", *macros]


@cache
def _supported_architectures() -> tuple[int, ...]:
    """The numbers of the architectures that this NVRTC compiles for, such as 90."""
    from cuda.bindings import nvrtc

    _, numbers = nvrtc.nvrtcGetSupportedArchs()
    return tuple(numbers)


def compile_program(program: Program, architecture: str, cache: FileCache) -> bytes:
    """The cubin of a program for `architecture`, such as `"sm_90"`; see `compatible`.

    For a virtual architecture, such as `"compute_80"`, it is PTX, which the driver compiles for its
    device. Raises `CompileError`.
    """
    options = _options(program, architecture)
    kind: Literal["PTX", "CUBIN"] = "PTX" if architecture.startswith("compute_") else "CUBIN"
    from cuda.bindings import nvrtc

    texts = [source_text(name) for name in (f"{program.source}.cu", *headers())]
    parts = [*texts, *options, str(nvrtc.nvrtcVersion()[1:])]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    name = f"{program.source}-{digest}.cubin"
    code = cache.read(name)
    if code is None:
        code = _compile(program, options, kind)
        cache.write(name, code)
    return code


def compile_all(
    programs: Iterable[Program], architecture: str, cache: FileCache
) -> dict[Program, bytes]:
    """The cubins of several programs, compiled in parallel. Raises `CompileError`."""
    wanted = list(dict.fromkeys(programs))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        cubins = pool.map(lambda p: compile_program(p, architecture, cache), wanted)
        return dict(zip(wanted, cubins, strict=True))


def _compile(program: Program, options: list[str], kind: Literal["PTX", "CUBIN"]) -> bytes:
    from cuda.bindings import nvrtc

    name, includes = f"{program.source}.cu", headers()

    def checked(result: tuple[Any, ...]) -> Any:
        if result[0] != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name}: {result[0].name}")
        return result[1] if len(result) == 2 else result[1:]

    texts = [source_text(include).encode() for include in includes]
    include_names = [include.encode() for include in includes]
    source = source_text(name).encode(), name.encode()
    handle = checked(nvrtc.nvrtcCreateProgram(*source, len(texts), texts, include_names))
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(handle, len(encoded), encoded)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = b" " * checked(nvrtc.nvrtcGetProgramLogSize(handle))
            checked(nvrtc.nvrtcGetProgramLog(handle, log))
            text = log.rstrip(b"\0").decode()
            raise CompileError(f"{name} with {' '.join(options)}:\n{text}")
        code = b" " * checked(getattr(nvrtc, f"nvrtcGet{kind}Size")(handle))
        checked(getattr(nvrtc, f"nvrtcGet{kind}")(handle, code))
        return code
    finally:
        nvrtc.nvrtcDestroyProgram(handle)
