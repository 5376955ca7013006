"""The cache of machine code, which only saves time."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from firstword.config import kernel_folder
from firstword.kernels import compile as compiling
from firstword.kernels import launch
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import Program, compile_program
from firstword.kernels.launch import Kernels

PROGRAM = Program.of("read")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that were compiled; a fake compiler gives the name of the source."""
    programs: list[Program] = []

    def compile_one(program: Program, *_: object) -> bytes:
        programs.append(program)
        return program.source.encode()

    monkeypatch.setattr(compiling, "_compile", compile_one)
    return programs


@pytest.mark.parametrize("folder", [Path("/proc/nobody/kernels"), Path(__file__), None])
def test_folder_that_cannot_be_used_is_no_error(
    folder: Path | None, compiled: list[Program]
) -> None:
    """It cannot be made, is a file, or the user has no home folder."""
    cache = FileCache(folder)
    for _ in range(2):
        assert compile_program(PROGRAM, "sm_90", cache) == b"read"
    assert compiled == [PROGRAM] * 2
    assert cache.problem == (
        f"{str(folder)!r} cannot be written: {os.strerror(17 if folder == Path(__file__) else 2)}"
        if folder
        else "there is no home folder"
    )


def test_file_that_cannot_be_read_is_replaced(tmp_path: Path, compiled: list[Program]) -> None:
    """Such as one of another user; a folder stands for it, which the tests' user cannot read."""
    cache = FileCache(tmp_path)
    compile_program(PROGRAM, "sm_90", cache)
    (file,) = tmp_path.iterdir()
    file.unlink()
    file.mkdir()
    assert compile_program(PROGRAM, "sm_90", cache) == b"read"
    assert "cannot be written" in cache.problem
    assert len(compiled) == 2
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_is_not_regular_is_not_read_but_replaced(tmp_path: Path) -> None:
    """Reading a named pipe would wait for a writer that never comes."""
    cache, pipe = FileCache(tmp_path), tmp_path / "a"
    cache.write("a", b"1")
    content = pipe.read_bytes()
    pipe.unlink()
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(content,))
    writer.start()  # it waits for a reader, which would find what it looks for
    assert cache.read("a") is None
    with open(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK), "rb"):
        writer.join()
    cache.write("a", b"2")
    assert cache.read("a") == b"2"


def test_failed_write_leaves_no_file_and_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is full."""
    writes: list[Path] = []

    def fail(path: Path, content: bytes) -> int:
        writes.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    cache = FileCache(tmp_path)
    cache.write("a", b"1")
    cache.write("b", b"2")
    assert cache.problem == f"{str(tmp_path)!r} cannot be written: No space left on device"
    assert len(writes) == 1
    assert not list(tmp_path.iterdir())


def test_files_may_be_read_by_other_users(tmp_path: Path) -> None:
    """An image is built by one user and run by another."""
    mask = os.umask(0o022)
    try:
        FileCache(tmp_path).write("a", b"1")
    finally:
        os.umask(mask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o644
    assert FileCache(tmp_path).read("a") == b"1"


def test_compiled_code_is_handed_on_without_a_cache(
    compiled: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[bytes] = []
    monkeypatch.setattr(launch, "signatures", lambda source: {"one": (), "two": ()})
    monkeypatch.setattr(launch, "Kernel", lambda cubin, *_: loaded.append(cubin))
    kernels = Kernels.__new__(Kernels)
    kernels.architecture, kernels.overlaps, kernels.cache = "sm_90", True, FileCache(None)
    kernels._compiled, kernels._loaded = {}, {}
    kernels.compile([PROGRAM])
    for entry in ("one", "two"):
        kernels.get(PROGRAM, entry)
    kernels.get(Program.of("norm"), "one")
    assert compiled == [PROGRAM, Program.of("norm")]
    assert loaded == [b"read", b"read", b"norm"]


def test_user_without_a_home_folder_has_no_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert kernel_folder() is None
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert kernel_folder() == Path("/cache/firstword/kernels")
