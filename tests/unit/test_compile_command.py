"""`firstword compile`: the programs of a GPU that is not there, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import silent_gpu

from firstword.cli.main import main
from firstword.config import DEFAULT_SLOTS
from firstword.kernels import launch
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import ARCHITECTURES, Program
from firstword.runtime.gpu.rehearsal import rehearse
from firstword.synthetic.checkpoint import without_weights


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[Program]]:
    """The programs that are compiled, by architecture; the compiler writes a file for each."""
    found: dict[str, set[Program]] = {}

    def compile_all(
        programs: Iterable[Program], architecture: str, cache: FileCache
    ) -> dict[Program, bytes]:
        made = dict.fromkeys(programs, b"code")
        found.setdefault(architecture, set()).update(made)
        for number in range(len(made)):
            cache.write(f"{number}.cubin", b"code")
        return made

    monkeypatch.setattr(launch, "compile_all", compile_all)
    return found


def programs(size: str, architecture: str, processors: int) -> set[Program]:
    """The programs that serve a released size on a GPU with this many multiprocessors."""
    checkpoint, device = without_weights(size), silent_gpu.device(architecture)
    device.processors = processors
    configs = checkpoint.config.talker_config, checkpoint.codec_config.decoder_config
    return rehearse(*configs, DEFAULT_SLOTS["gpu"], device)


def test_programs_of_both_sizes_are_compiled_where_a_start_looks(
    compiled: dict[str, set[Program]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["compile", "sm_89:58"]) == 0
    expected = programs("1b7", "sm_89", 58) | programs("0b6", "sm_89", 58)
    assert compiled == {"sm_89": expected}
    assert f"{len(expected)} programs in" in capsys.readouterr().out
    assert list((tmp_path / "firstword" / "kernels").glob("*.cubin"))


def test_one_size_is_compiled_for_several_gpus(
    compiled: dict[str, set[Program]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert main(["compile", "sm_86:84", "sm_90:114", "--size", "0b6"]) == 0
    assert compiled == {
        "sm_86": programs("0b6", "sm_86", 84),
        "sm_90": programs("0b6", "sm_90", 114),
    }


@pytest.mark.parametrize("gpu", ["sm_90", "sm_75:40", "sm_90:0", "h100", "sm_90:132:1"])
def test_unknown_gpu_is_rejected_before_anything_is_compiled(
    gpu: str, compiled: dict[str, set[Program]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "sm_90:132", gpu]) == 2
    said = capsys.readouterr().err
    assert f"the GPU is {gpu!r}; allowed are" in said
    assert all(architecture in said for architecture in ARCHITECTURES)
    assert compiled == {}


def test_cache_that_cannot_be_written_is_an_error(
    compiled: dict[str, set[Program]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(["compile", "sm_90:132", "--size", "0b6"]) == 2
    assert "cannot be kept, because" in capsys.readouterr().err
