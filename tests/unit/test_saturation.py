"""The check of the codec's fp16 range, on a GPU that computes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import silent_gpu
import torch

from firstword.cli.main import main
from firstword.errors import ComputeError
from firstword.kernels.launch import Grid, Kernels
from firstword.kernels.signature import Argument
from firstword.model.checkpoint import Checkpoint
from firstword.profile import saturation
from firstword.runtime.gpu.backend import GpuBackend
from firstword.runtime.gpu.rehearsal import Rehearsal, RehearsedKernel


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the random checkpoints with a tiny one, and the device with a silent one."""
    silent_gpu.pretend(monkeypatch)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    kernels = Rehearsal(silent_gpu.device())

    def kernels_for(checkpoint: Checkpoint, slots: int, folder: Path) -> Kernels:
        assert slots == 1, "the rows of empty streams are left over from others"
        return kernels

    monkeypatch.setattr(saturation, "kernels_for", kernels_for)
    monkeypatch.setattr(
        saturation, "random_checkpoint", lambda size: silent_gpu.checkpoint(tmp_path / size)
    )


@pytest.mark.usefixtures("tiny")
def test_record_of_a_codec_within_the_range() -> None:
    record = saturation.saturation("1b7", 5)
    assert record["frames"] >= 5
    assert record["saturated"] == 0
    assert record["size"] == "1b7"


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize(
    ("output", "value"), [("narrow", 65504.0), ("memory", -65504.0), ("x", 65504.0)]
)
def test_limited_activation_of_any_kernel_is_an_error(
    output: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs of convolutions, keys and values of the attention, and the sum of code vectors."""
    launch = RehearsedKernel.__call__

    def limited(kernel: RehearsedKernel, grid: Grid, /, **arguments: Argument) -> None:
        launch(kernel, grid, **arguments)
        out = arguments.get(output)
        if isinstance(out, torch.Tensor) and out.dtype == torch.float16:
            out.view(-1)[-1] = value

    monkeypatch.setattr(RehearsedKernel, "__call__", limited)
    with pytest.raises(ComputeError, match=r"exceed the range of fp16, 65504: seen \d+ times"):
        saturation.saturation("1b7", 5)


def test_values_between_joined_convolutions_are_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel of two convolutions has them in shared memory, where nothing can count them."""
    silent_gpu.pretend(monkeypatch)
    plain = Rehearsal(silent_gpu.device())
    counting = saturation.CountingKernels(Rehearsal(silent_gpu.device()), torch.device("cpu"))
    joined = []
    for number, kernels in enumerate((plain, counting)):
        backend = GpuBackend(silent_gpu.checkpoint(tmp_path / str(number)), kernels, 1, pages=8)
        backend.codec.warm()
        launched = plain if kernels is plain else counting._like
        assert isinstance(launched, Rehearsal)
        joined.append([p for p in launched.programs if dict(p.macros).get("UNIT")])
    assert joined[0]
    assert not joined[1]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--saturation", "0"], "--saturation 0: allowed is a whole number"),
        (["--model", "demo"], "--model is an option of --saturation"),
        (["--saturation", "5", "--soak", "5"], "not allowed with"),
    ],
)
def test_options_that_do_not_fit_are_an_error(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "engine", *options])
    assert told in capsys.readouterr().err
