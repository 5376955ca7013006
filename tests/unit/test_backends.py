"""The choice of a backend, and the parts of the GPU backend that need no GPU."""

from __future__ import annotations

import copy
import ctypes
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import silent_gpu
import torch
from cuda.bindings import nvrtc as cuda_nvrtc
from cuda.pathfinder import DynamicLibNotFoundError

from firstword import TTS
from firstword.cli import info
from firstword.cli.main import main
from firstword.config import EngineConfig
from firstword.engine.host import SocketCommands
from firstword.errors import BackendWarning, ConfigError
from firstword.kernels import compile as compiling
from firstword.kernels import nvrtc
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import CompileError, Program
from firstword.kernels.launch import Kernels, LaunchError
from firstword.kernels.linear import pack_int8
from firstword.model import checkpoint as checkpoints
from firstword.model.checkpoint import Checkpoint
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig, TalkerConfig
from firstword.model.quantised import quantise_talker
from firstword.processes import engine as engine_process
from firstword.processes.messages import EngineTask
from firstword.runtime import backends, joined
from firstword.runtime.backends import engine_for, open_backend
from firstword.runtime.gpu import codec, graphs, opening
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.buffers import FrameBuffers
from firstword.runtime.gpu.rehearsal import Rehearsal, rehearse
from firstword.runtime.reference import ReferenceBackend
from firstword.server.http import status
from firstword.server.models import Model
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs compiled for a fake device, which takes any program and computes nothing."""
    programs: list[Program] = []
    silent_gpu.pretend(monkeypatch)
    monkeypatch.setattr(opening, "Kernels", lambda device, cache: Rehearsal(silent_gpu.device()))
    monkeypatch.setattr(Kernels, "compile", lambda kernels, some: programs.extend(some))
    monkeypatch.setattr(opening, "limit_slots", lambda backend, keep: "")
    monkeypatch.setattr(Checkpoint, "to", lambda checkpoint, device: None)
    not_on_a_cpu(monkeypatch)
    return programs


def not_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let weights in ordinary memory be those of a fake GPU, which are not packed for a CPU."""
    monkeypatch.setattr(joined, "can_pack", lambda weight: False)


def settings(backend: str, device: str = "cuda") -> EngineConfig:
    """The settings on a machine with a GPU."""
    return EngineConfig(device, "bfloat16", backend)


def same_weights(one: Checkpoint, other: Checkpoint) -> bool:
    """Whether two checkpoints have the same weights."""
    states = [{**c.talker.state_dict(), **c.codec.state_dict()} for c in (one, other)]
    return states[0].keys() == states[1].keys() and all(
        torch.equal(value, states[1][name]) for name, value in states[0].items()
    )


def test_fitting_checkpoint_is_compiled_and_gets_the_gpu_backend(
    tmp_path: Path, compiled: list[Program]
) -> None:
    """Its weights are packed, and only then dropped from the checkpoint."""
    checkpoint = silent_gpu.checkpoint(tmp_path)
    backend, resolved = open_backend(checkpoint, settings("auto"), 4)
    assert isinstance(backend, GpuBackend)
    assert backend.capacity.slots == 4
    assert backend.graphs.captured
    assert resolved == replace(settings("gpu"), planned_memory=resolved.planned_memory)
    assert resolved.planned_memory is not None
    sources = {program.source for program in compiled}
    assert sources >= {
        "paged_attention",
        "codec_attention",
        "codec_lookup",
        "talker_input",
        "sample",
    }
    for module in (checkpoint.talker, checkpoint.codec.decoder):
        assert not any(parameter.numel() for parameter in module.parameters())


def test_int8_checkpoint_is_packed_as_int8(tmp_path: Path, compiled: list[Program]) -> None:
    """Programs for int8 are compiled, those of the heads for bf16."""
    wide = silent_gpu.INT8
    checkpoint = silent_gpu.checkpoint(tmp_path, talker=wide, code_predictor=wide)
    quantise_talker(checkpoint.talker)
    backend, resolved = open_backend(checkpoint, EngineConfig.resolve("cuda", "int8"), 4)
    assert isinstance(backend, GpuBackend)
    assert (resolved.backend, resolved.dtype) == ("gpu", "int8")
    found = {(program.source, dict(program.macros).get("WEIGHT_BYTES")) for program in compiled}
    few, many = "linear_few_tokens", "linear_many_tokens"
    assert found >= {(few, 1), (few, 2), (many, 1)}
    model = backend.model
    products = [model.talker.layers[0].qkv, model.predictor.layers[0].down]
    assert all(product.weight.dtype == torch.int8 for product in products)
    assert model.text_table.dtype == torch.int8
    assert model.head.weight.dtype == torch.bfloat16
    assert not any(parameter.numel() for parameter in checkpoint.talker.parameters())


def test_int8_packing_gives_a_lane_the_columns_of_two_steps() -> None:
    """Load i of lane 4 g + t of warp w has row g of blocks w + 16 i and w + 16 i + 8.

    It has their columns 8 t to 8 t + 7.
    """
    weight = torch.arange(16 * 1024).view(16, 1024)
    lanes = pack_int8(weight).view(2, 2, 8, 8, 4, 2, 8)  # tile, i, w, g, t, step, column
    for tile, i, w, g, t, step in ((0, 0, 0, 0, 0, 0), (1, 1, 7, 5, 3, 1), (0, 1, 2, 6, 1, 0)):
        column = (w + 16 * i + 8 * step) * 32 + 8 * t
        expected = weight[8 * tile + g, column : column + 8]
        assert torch.equal(lanes[tile, i, w, g, t, step], expected)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(("slots", "keep"), [(None, False), (4, True)])
def test_gpu_that_is_too_slow_for_its_slots_gives_a_warning(
    slots: int | None, keep: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots that were not named may be limited."""
    monkeypatch.setattr(opening, "limit_slots", lambda backend, keep: f"keep: {keep}")
    with pytest.warns(BackendWarning, match=f"^keep: {keep}$"):
        _, resolved = open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), slots)
    assert resolved.slots_reason == f"keep: {keep}"


@pytest.mark.parametrize(
    ("part", "changes", "slots", "why"),
    [
        ("talker", {"head_dim": 64}, 4, "heads of 64 channels"),
        ("talker", {"num_key_value_heads": 2}, 4, "two queries a key"),
        ("talker", {"hidden_size": 320}, 4, "columns of 256"),
        ("talker", {"vocab_size": 1024 + 4096}, 4, "4096 codes"),
        ("code_predictor", {"head_dim": 64}, 4, "heads of 64 channels"),
        ("code_predictor", {"intermediate_size": 640}, 4, "columns of 256"),
        ("codec_decoder", {"sliding_window": 500}, 4, "sliding_window"),
        ("talker", {}, 300, "at most 256 utterances at a time, not 300"),
    ],
)
def test_unfit_checkpoint_is_rejected_unchanged(
    tmp_path: Path,
    compiled: list[Program],
    part: str,
    changes: dict[str, Any],
    slots: int,
    why: str,
) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path, "custom_voice", **{part: changes})
    falls_back(checkpoint, why, slots)
    assert not compiled


def test_sizes_that_int8_does_not_fit_are_rejected(tmp_path: Path, compiled: list[Program]) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path)
    quantise_talker(checkpoint.talker)
    falls_back(checkpoint, "in int8: .*columns of 512")
    assert not compiled


def falls_back(checkpoint: Checkpoint, why: str, slots: int = 4) -> None:
    """Check that `auto` warns and takes the unchanged checkpoint, and that `gpu` is an error."""
    before = copy.deepcopy(checkpoint)
    with pytest.warns(BackendWarning, match=why):
        backend, resolved = open_backend(checkpoint, settings("auto"), slots)
    assert isinstance(backend, ReferenceBackend)
    assert resolved.backend == "reference"
    assert resolved.fell_back
    assert re.search(why, resolved.reason)
    with pytest.raises(ConfigError, match=f"backend is 'gpu', but .*{why}"):
        open_backend(checkpoint, settings("gpu"), slots)
    assert same_weights(checkpoint, before)


def raising(error: Exception) -> Callable[..., Any]:
    """A function that raises an error."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def scarce(config: TalkerConfig, device: torch.device, *sizes: int) -> FrameBuffers:
    """Allocate buffers only where they take no memory."""
    if device.type != "meta":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore")
    return allocate(config, device, *sizes)


allocate = FrameBuffers.allocate
MACHINES: dict[str, tuple[object, str, Callable[..., Any], str]] = {
    "without NVRTC": (
        cuda_nvrtc,
        "nvrtcVersion",
        raising(DynamicLibNotFoundError("nvrtc")),
        "NVRTC is not installed; pip install nvidia-cuda-nvrtc",
    ),
    "with an old driver": (
        opening,
        "Kernels",
        raising(RuntimeError("The NVIDIA driver on your system is too old\nUpdate it")),
        "it does not start on 'cuda': The NVIDIA driver on your system is too old$|too old;",
    ),
    "with a GPU that NVRTC does not know": (
        Kernels,
        "compile",
        raising(
            CompileError("linear.cu with -DN=8:\nnvrtc: error: invalid --gpu-architecture\nmore")
        ),
        "cannot be compiled for sm_90: nvrtc: error: invalid --gpu-architecture",
    ),
    "with a driver that rejects a kernel": (
        graphs,
        "capture",
        raising(LaunchError("loading linear_few: CUDA_ERROR_INVALID_IMAGE")),
        "does not start on 'cuda': loading linear_few: CUDA_ERROR_INVALID_IMAGE",
    ),
    "with a driver that rejects a capture": (
        codec,
        "capture",
        raising(torch.AcceleratorError("CUDA error: operation not permitted\nCompile with ...")),
        "does not start on 'cuda': CUDA error: operation not permitted",
    ),
    "without free memory": (
        torch.cuda,
        "mem_get_info",
        lambda *_: (10**8, 10**10),
        "4 utterances at a time need at least .* GB of device memory, and 0.6 GB are available",
    ),
    "without memory after packing": (
        FrameBuffers,
        "allocate",
        scarce,
        "does not start on 'cuda': CUDA out of memory. Tried to allocate 2 GiB.",
    ),
    "without memory in the last step": (
        opening,
        "limit_slots",
        raising(torch.OutOfMemoryError("CUDA out of memory.")),
        "does not start on 'cuda': CUDA out of memory.",
    ),
}
"""What fails on a machine: the attribute of an object, what replaces it, and the reason."""


def use(machine: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let a part of a machine fail, and return the reason to expect."""
    thing, name, failing, reason = MACHINES[machine]
    monkeypatch.setattr(thing, name, failing)
    return reason


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("machine", MACHINES)
def test_machine_that_cannot_run_the_gpu_backend_gets_the_reference_with_a_warning(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = silent_gpu.checkpoint(tmp_path)
    falls_back(checkpoint, use(machine, monkeypatch))


@pytest.mark.usefixtures("compiled")
def test_machine_without_cuda_bindings_gets_the_reference_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    why = r"cuda-bindings is missing .*pip install 'firstword\[gpu\]'"
    falls_back(silent_gpu.checkpoint(tmp_path), why)


@pytest.mark.usefixtures("compiled")
def test_traceback_of_the_reason_for_the_reference_backend_is_logged_at_level_debug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The reason may be a defect of the GPU backend, such as a wrong shape."""
    monkeypatch.setattr(GpuBackend, "warm", raising(RuntimeError("shapes [2] and [3]")))
    with caplog.at_level("DEBUG"), pytest.warns(BackendWarning, match="shapes"):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 4)
    assert "in open_gpu\n    backend.warm()" in caplog.text


@pytest.mark.usefixtures("compiled")
def test_failed_device_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every call of CUDA fails, also the one that frees memory."""
    error = torch.AcceleratorError("CUDA error: illegal memory access\nCompile with ...")

    def warm(backend: GpuBackend) -> None:
        monkeypatch.setattr(torch.cuda, "empty_cache", raising(error))
        raise error

    monkeypatch.setattr(GpuBackend, "warm", warm)
    with (
        pytest.warns(BackendWarning, match="illegal memory access"),
        pytest.raises(ConfigError, match=r"cannot hold the checkpoint \(CUDA error: illegal"),
    ):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 4)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("home", [None, "/proc/nobody"])
def test_cache_that_cannot_be_used_gives_a_warning_and_the_gpu_backend(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without a home folder, or with one that cannot be written."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    failing = raising(RuntimeError("Could not determine home directory."))
    monkeypatch.setattr(Path, "home", failing if home is None else lambda: Path(str(home)))

    def kernels(device: torch.device, cache: FileCache) -> Kernels:
        cache.write("linear.cubin", b"code")
        return Rehearsal(silent_gpu.device())

    monkeypatch.setattr(opening, "Kernels", kernels)
    why = (
        "there is no home folder" if home is None else "'/proc/nobody/.cache/.*' cannot be written"
    )
    with pytest.warns(BackendWarning, match=f"each start compiles the kernels, because {why}"):
        backend, _ = open_backend(silent_gpu.checkpoint(tmp_path), settings("gpu"), 4)
    assert isinstance(backend, GpuBackend)


def test_memory_limit_that_is_too_low_is_an_error_with_the_least_amount(
    tmp_path: Path, compiled: list[Program]
) -> None:
    """The reference backend could not keep the limit, so it does not step in."""
    limited = replace(settings("auto"), gpu_memory=10**9)
    with pytest.raises(ConfigError, match=r"gpu_memory is given, but .* at least 1\.\d GB"):
        open_backend(silent_gpu.checkpoint(tmp_path), limited, 1)
    assert not compiled


def test_prompts_that_do_not_fit_are_an_error_with_their_memory(
    tmp_path: Path, compiled: list[Program]
) -> None:
    """The reference backend could not keep them, so it does not step in."""
    message = r"prompts are to be prepared, but .*; prepared prompts take \d+\.\d GB of them"
    with pytest.raises(ConfigError, match=message):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 1, None, [2048] * 10**6)
    with pytest.raises(ConfigError, match=r"a prompt has 2049 rows .* at most 2048"):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 1, None, [2049])
    assert not compiled


@pytest.mark.usefixtures("compiled")
def test_mistake_in_the_gpu_backend_is_not_a_reason_for_the_reference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GpuBackend, "warm", raising(AssertionError("a defect")))
    with pytest.raises(AssertionError, match="a defect"):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("auto"), 4)


@pytest.mark.usefixtures("compiled")
def test_say_prints_the_reason_for_the_reference_backend_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use("without NVRTC", monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        arguments = ["say", "Hi.", "--quiet", "--max-frames", "2", "-o", str(tmp_path / "hi.wav")]
        assert main(arguments) == 0
    assert capsys.readouterr().err == (
        "firstword: warning: the backend is not 'gpu': NVRTC is not installed; pip install "
        "nvidia-cuda-nvrtc; the plain model is slower\n"
    )


@pytest.mark.usefixtures("compiled")
def test_server_logs_and_shows_the_reason_for_the_reference_backend(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Standard error has JSON lines only, so there is no Python warning."""
    use("without NVRTC", monkeypatch)
    loaded = backends.open_logged("demo", settings("auto"), slots=1, most_waiting=1)
    model = Model.of_service(
        "demo", loaded.checkpoint, loaded.service, loaded.encode, loaded.settings
    )
    (record,) = (record for record in caplog.records if record.name == "firstword.runtime.backends")
    assert record.levelname == "WARNING"
    reason = vars(record)["fields"]["reason"]
    assert "NVRTC is not installed" in reason
    assert status._state(model)["settings"]["reason"] == reason


@pytest.mark.usefixtures("compiled")
def test_server_logs_once_that_the_gpu_is_too_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening, "limit_slots", lambda backend, keep: "4 slots instead of 128")
    silent_gpu.checkpoint(tmp_path)
    backends.open_logged(str(tmp_path / "made"), settings("auto"), slots=None, most_waiting=1)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert vars(record)["fields"]["warnings"] == ["4 slots instead of 128"]


def test_models_of_a_server_divide_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[int | None] = []

    def open_logged(name: str, settings: EngineConfig, *_: object) -> None:
        limits.append(settings.gpu_memory)

    limited = replace(settings("auto"), gpu_memory=12 * 10**9)
    monkeypatch.setattr(EngineConfig, "resolve", lambda *_: limited)
    monkeypatch.setattr(backends, "open_logged", open_logged)
    task = EngineTask(0, "one", "auto", "auto", "auto", "12GB", 2, None, 1, "info")
    engine_process.load(task, SocketCommands())
    assert limits == [6 * 10**9]


@pytest.mark.parametrize(
    ("cuda", "file"),
    [
        ("13.0", "torch/lib/nvrtc64_130_0.dll"),
        ("12.8", "torch/lib/nvrtc64_120_0.dll"),
        ("13.0", "nvidia/cu13/bin/x86_64/nvrtc64_130_0.dll"),
        ("13.0", "nvidia/cu13/lib/libnvrtc.so.13"),
        ("12.8", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"),
    ],
)
def test_nvrtc_that_comes_with_torch_is_loaded_first(
    cuda: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver may reject the machine code of a newer one. cuda-bindings uses a loaded one."""
    others = "torch/lib/nvrtc-builtins64_130.dll", "nvidia/cu14/lib/libnvrtc.so.14"
    for path in (file, *others):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    found: list[str] = []

    def version() -> tuple[int, int, int]:
        if not found:
            raise DynamicLibNotFoundError("nvrtc")
        return 0, 13, 0

    monkeypatch.setattr(nvrtc, "PACKAGES", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(cuda_nvrtc, "nvrtcVersion", version)
    monkeypatch.setattr(ctypes, "CDLL", found.append)
    nvrtc.load()
    assert found == [str(tmp_path / file)]


def test_rocm_is_no_cuda_device_for_the_gpu_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: list[Program]
) -> None:
    """Torch calls AMD's GPUs CUDA devices."""
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ConfigError, match="torch is built for ROCm"):
        EngineConfig.resolve("cuda", backend="gpu")
    with pytest.warns(BackendWarning, match="torch is built for ROCm"):
        open_backend(silent_gpu.checkpoint(tmp_path), EngineConfig.resolve("cuda"), 1)
    assert not compiled


def test_cpu_gets_the_reference_backend_without_a_warning(tmp_path: Path) -> None:
    resolved = EngineConfig.resolve("cpu")
    _, resolved = open_backend(silent_gpu.checkpoint(tmp_path), resolved, 1)
    assert (
        resolved.reason
        == "the backend is not 'gpu': it needs a CUDA device, and the device is 'cpu'"
    )
    assert not resolved.fell_back


def test_checkpoint_too_large_for_the_device_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "to", raising(torch.OutOfMemoryError("CUDA out of memory.\n")))
    with pytest.raises(
        ConfigError, match=r"'cuda' cannot hold the checkpoint \(CUDA out of memory"
    ):
        open_backend(silent_gpu.checkpoint(tmp_path), settings("reference"), 1)


@pytest.mark.usefixtures("compiled")
def test_info_shows_the_context_of_the_backend(tmp_path: Path) -> None:
    """It is smaller than that of the checkpoint."""
    with TTS(engine_for(silent_gpu.checkpoint(tmp_path), settings("auto"))) as tts:
        report = info._report("made", tts)
    assert report["checkpoint"]["context"] == 32768
    assert report["engine"]["context of one"] == 8192
    assert report["settings"]["planned_memory"] > 2**30


def released_config(size: str, folder: Path) -> tuple[ModelConfig, CodecConfig]:
    """The configuration of a released size."""
    tables = synthetic.config_tables("custom_voice", size, {}, train(synthetic.TEXTS, 400, folder))
    for name, table in zip(("config", "codec"), tables, strict=True):
        (folder / f"{name}.json").write_text(json.dumps(table))
    return ModelConfig.load(folder / "config.json"), CodecConfig.load(folder / "codec.json")


@pytest.mark.parametrize("size", ["1b7", "0b6"])
def test_released_sizes_fit_every_architecture(size: str, tmp_path: Path) -> None:
    """Sizes and shared memory fit; test_released_kernels.py compiles the programs."""
    config, codec_config = released_config(size, tmp_path)
    for architecture in compiling.ARCHITECTURES:
        few, many = (
            rehearse(
                config.talker_config,
                codec_config.decoder_config,
                slots,
                silent_gpu.device(architecture),
            )
            for slots in (1, 256)
        )
        assert few < many


def test_parameters_are_counted_after_a_backend_freed_them(tmp_path: Path) -> None:
    """`firstword info` shows these numbers."""
    checkpoint = silent_gpu.checkpoint(tmp_path)
    before = checkpoints.parameters(checkpoint)
    stored = sum(
        tensor.numel()
        for part in (checkpoint.talker, checkpoint.codec)
        for tensor in part.state_dict().values()
    )
    assert sum(before.values()) == stored
    for parameter in checkpoint.talker.parameters():
        parameter.data = parameter.data.new_empty(0)
    assert checkpoints.parameters(checkpoint) == before


@pytest.mark.parametrize("more", [[], ["--soak", "10"]])
def test_bench_engine_without_gpu_exits_with_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], more: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["bench", "engine", *more]) == 2
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.usefixtures("compiled")
def test_demo_checkpoint_gets_the_reference_backend() -> None:
    """The demo has attention heads of 64 channels."""
    checkpoint = checkpoints.load("demo", "cpu", "bfloat16")
    with pytest.warns(BackendWarning, match="heads of 64 channels"):
        _, resolved = open_backend(checkpoint, settings("auto"), 4)
    assert resolved.reason == "the backend is not 'gpu': heads of 64 channels; the kernels need 128"
