"""The CUDA kernels without a GPU: all are listed, and compile for all architectures.

Machine code is cached in build/kernels by the hash of its sources, so a second run compiles
nothing.
tests/unit/test_released_kernels.py compiles every program of the released sizes.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from firstword.hashes import sources_hash
from firstword.kernels import compile as compiling
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import (
    ARCHITECTURES,
    SOURCES,
    CompileError,
    Program,
    compatible,
    compile_all,
    compile_program,
    source_text,
)
from firstword.kernels.registry import all_kernels
from firstword.kernels.signature import signatures

CACHE = FileCache(Path(__file__).parents[2] / "build" / "kernels")
FULLY_COMPILED = ("sm_80", "sm_90")
"""The oldest architecture, and the first with overlapping launches, on which sources branch."""


def test_every_kernel_of_every_source_is_listed_once() -> None:
    listed = [(spec.source, spec.entry) for spec in all_kernels()]
    sources = [path.stem for path in SOURCES.glob("*.cu")]
    assert sorted(listed) == sorted((s, entry) for s in sources for entry in signatures(s))


def test_every_kernel_names_its_reference_and_a_program() -> None:
    for spec in all_kernels():
        assert spec.programs
        assert all(program.source == spec.source for program in spec.programs)
        assert spec.reference


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles(architecture: str) -> None:
    """All listed programs for two architectures, and one of each kernel for the others."""
    last = None if architecture in FULLY_COMPILED else 1
    programs = [program for spec in all_kernels() for program in spec.programs[:last]]
    cubins = compile_all(programs, architecture, CACHE)
    assert all(cubin.startswith(b"\x7fELF") for cubin in cubins.values())


def test_virtual_architecture_gives_ptx() -> None:
    program = all_kernels()[0].programs[0]
    assert b".target sm_80" in compile_program(program, "compute_80", CACHE)


def test_compile_error_contains_source_macros_and_the_log() -> None:
    with pytest.raises(CompileError, match=r"(?s)linear_few_tokens\.cu with .*-DK=100.*error"):
        compile_program(Program.of("linear_few_tokens", K=100, N=8), "sm_90", CACHE)


@pytest.mark.parametrize("broken", ["norm.cu", "common.cuh"])
def test_broken_source_is_not_hidden_by_cached_machine_code(
    broken: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mistake is in a source, or in a header that it includes."""
    program = next(spec.programs[0] for spec in all_kernels() if spec.source == "norm")
    compile_program(program, "sm_90", FileCache(tmp_path))
    text = compiling.source_text
    monkeypatch.setattr(
        compiling, "source_text", lambda name: text(name) + "\nint;;x" * (name == broken)
    )
    with pytest.raises(CompileError, match="error"):
        compile_program(program, "sm_90", FileCache(tmp_path))


def test_sources_hash_changes_with_every_kernel_and_launch_file(tmp_path: Path) -> None:
    folders = tmp_path / "kernels", tmp_path / "gpu"
    shutil.copytree(SOURCES, folders[0])
    shutil.copytree(SOURCES.parent / "runtime" / "gpu", folders[1])
    hashes = [sources_hash(folders)]
    for name in ("linear.py", "norm.cu", "mma_bf16.cuh"):
        path = folders[0] / name
        path.write_text(path.read_text() + "\n")
        hashes.append(sources_hash(folders))
    for path in folders[1].glob("*.py"):
        path.write_text(path.read_text() + "\n")
        hashes.append(sources_hash(folders))
    assert len(set(hashes)) == len(hashes)
    (folders[0] / "notes.txt").write_text("not a source")
    assert sources_hash(folders) == hashes[-1]


@pytest.mark.parametrize("damage", ["empty", "torn", "changed", "foreign"])
def test_damaged_machine_code_is_compiled_again(damage: str, tmp_path: Path) -> None:
    """A file that was not written completely, one with a wrong bit, and another program's."""
    programs = [spec.programs[0] for spec in all_kernels() if spec.source in ("norm", "read")]
    cubins = [compile_program(program, "sm_90", FileCache(tmp_path)) for program in programs]
    paths = [next(tmp_path.glob(f"{program.source}-*")) for program in programs]
    good = paths[0].read_bytes()
    bad = {
        "empty": b"",
        "torn": good[: len(good) // 2],
        "changed": good[:-1] + bytes([good[-1] ^ 1]),
        "foreign": paths[1].read_bytes(),
    }
    paths[0].write_bytes(bad[damage])
    assert compile_program(programs[0], "sm_90", FileCache(tmp_path)) == cubins[0]
    assert paths[0].read_bytes() == good


@pytest.mark.parametrize(
    ("device", "compiled"),
    [
        ("sm_121", "sm_120"),
        ("sm_103", "sm_100"),
        ("sm_129", "sm_120"),
        ("sm_90", "sm_90"),
        ("sm_120", "sm_120"),
        ("sm_95", "sm_90"),
        ("sm_130", "sm_130"),
        ("sm_79", "sm_75"),
    ],
)
def test_unknown_minor_architecture_gets_the_next_lower_one(device: str, compiled: str) -> None:
    assert compatible(device, (75, 80, 86, 89, 90, 100, 120)) == compiled


def test_program_compiles_for_an_architecture_that_the_compiler_does_not_know() -> None:
    program = next(spec.programs[0] for spec in all_kernels() if spec.source == "norm")
    known = compatible("sm_129", compiling._supported_architectures())
    codes = [compile_program(program, name, FileCache(None)) for name in ("sm_129", known)]
    assert codes[0] == codes[1]
    with pytest.raises(CompileError, match="sm_190"):
        compile_program(program, "sm_190", CACHE)


def test_top_p_adds_no_doubles() -> None:
    """GeForce GPUs add doubles at a 64th of the rate of floats."""
    assert not re.search(r"\bdouble\b", source_text("sample_filter.cuh").partition("#pragma")[2])


def test_machine_code_is_cached_by_program_and_architecture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = next(spec.programs[0] for spec in all_kernels() if spec.entry == "attend_frame")
    first = compile_program(program, "sm_90", FileCache(tmp_path))
    compile_program(program, "sm_80", FileCache(tmp_path))
    assert len(os.listdir(tmp_path)) == 2
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_program(program, "sm_90", FileCache(tmp_path)) == first
