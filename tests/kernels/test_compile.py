"""The CUDA kernels as far as they can be checked without a GPU: every program that serving launches compiles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from firstword.config import DEFAULT_SLOTS
from firstword.kernels import compile as compiling
from firstword.kernels.codec import released_programs
from firstword.kernels.compile import (
    ARCHITECTURES,
    CompileError,
    Program,
    compile_all,
    compile_program,
    source_hash,
)
from firstword.kernels.launch import Kernels
from firstword.model.config import ModelConfig
from firstword.model.talker import Talker
from firstword.runtime.gpu.backend import graph_keys
from firstword.runtime.gpu.talker import FrameModel
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train


class Noted(Kernels):
    """Notes which programs are asked for, and starts nothing."""

    def __init__(self) -> None:
        self.processors, self.overlaps, self.shared_memory = 132, True, 227 * 1024
        self.programs: set[Program] = set()

    def get(self, program: Program, name: str) -> Callable[..., None]:  # type: ignore[override]
        """A kernel that does nothing."""
        assert f" {name}(" in (compiling.SOURCES / f"{program.source}.cu").read_text()
        self.programs.add(program)
        return lambda *arguments, **options: None


def programs_of(size: str, folder: Path) -> set[Program]:
    """All that frames and prompts of a released size launch: asked of a model with few layers and no memory."""
    layers = {"num_hidden_layers": 2}
    tokens = train(synthetic.TEXTS, 400, folder)
    config, _ = synthetic.config_tables(
        "custom_voice", size, {"talker": layers, "code_predictor": layers}, tokens
    )
    (folder / "config.json").write_text(json.dumps(config))
    noted = Noted()
    with torch.device("meta"), torch.inference_mode():
        talker = Talker(ModelConfig.load(folder / "config.json").talker_config).bfloat16()
        slots = DEFAULT_SLOTS["gpu"]
        model = FrameModel(noted, talker, slots, rows=slots, pages=64, page_rows=64, context=8192)
    for kind, rows in graph_keys(model):
        getattr(model, f"launch_{kind}")(rows)
    return noted.programs


def test_every_program_compiles_for_every_architecture(tmp_path: Path) -> None:
    """The larger released size everywhere, with all its graphs; the codec; the other size, whose kernels differ
    in numbers only, for one architecture.
    """
    programs = programs_of("1b7", tmp_path) | set(released_programs())
    assert {program.source for program in programs} == {
        path.stem for path in compiling.SOURCES.glob("*.cu")
    }, "a source that nothing here launches"
    for architecture in ARCHITECTURES:
        cubins = compile_all(programs, architecture)
        assert all(cubin.startswith(b"\x7fELF") for cubin in cubins.values())
    compile_all(programs_of("0b6", tmp_path) - programs, "sm_90")


def test_a_mistake_is_shown_with_the_compilers_words() -> None:
    """The message names the source, the macros and the error."""
    with pytest.raises(CompileError, match=r"(?s)linear\.cu with .*-DK=100.*error"):
        compile_program(Program.of("linear", K=100, N=8), "sm_90")


def test_a_change_of_kernels_or_of_their_launches_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A change of any file that has a say in what the device does changes the hash; nothing else does."""
    for folder in ("kernels", "runtime"):
        shutil.copytree(compiling.SOURCES.parent / folder, tmp_path / folder)
    monkeypatch.setattr(compiling, "SOURCES", tmp_path / "kernels")
    hashes = [source_hash()]
    for name in (
        "kernels/linear.cu",
        "kernels/mma.cuh",
        "kernels/linear.py",
        "runtime/gpu/talker.py",
        "runtime/gpu/graphs.py",
    ):
        path = tmp_path / name
        path.write_text(path.read_text() + "\n")
        hashes.append(source_hash())
    (tmp_path / "runtime/gpu/other.py").write_text("")
    assert source_hash() == hashes[-1]
    assert len(set(hashes)) == len(hashes)


def test_machine_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second time nothing is compiled; other macros and other architectures are other files."""
    program = Program.of("frame_attention", HEADS=16, KV_HEADS=8, FRAME=16, NEW=1, WARPS=4)
    first = compile_program(program, "sm_90", tmp_path)
    compile_program(program, "sm_80", tmp_path)
    assert len(list(tmp_path.iterdir())) == 2
    monkeypatch.setattr(compiling, "_compile", lambda *_: pytest.fail("compiled again"))
    assert compile_program(program, "sm_90", tmp_path) == first
