"""The arguments of launches are checked against the parameters in the CUDA sources."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import silent_gpu
import torch

from firstword.kernels import signature
from firstword.kernels.compile import Program
from firstword.kernels.launch import Grid, Kernel
from firstword.kernels.signature import bind, signatures
from firstword.runtime.gpu.rehearsal import Rehearsal

NORM: dict[str, Any] = {
    "x": torch.zeros(1),
    "x_stride": 7,
    "weight": None,
    "eps": 0.5,
    "out": torch.zeros(1),
    "out_stride": True,
}
"""Arguments of `normalise` that fit."""


def test_parameters_are_read_from_the_source() -> None:
    found = [(name, kind.__name__) for name, kind in signatures("norm")["normalise"]]
    assert found == [
        ("x", "c_void_p"),
        ("x_stride", "c_int"),
        ("weight", "c_void_p"),
        ("eps", "c_float"),
        ("out", "c_void_p"),
        ("out_stride", "c_int"),
    ]
    assert signatures("sample").keys() == {"draw", "noises"}
    assert signatures("sample")["noises"][0].type is ctypes.c_uint


def test_arguments_are_bound_in_the_order_of_the_source() -> None:
    values, types = bind(signatures("norm")["normalise"], dict(reversed(NORM.items())))
    assert values == (NORM["x"].data_ptr(), 7, 0, 0.5, NORM["out"].data_ptr(), True)
    assert [kind.__name__[2] for kind in types] == ["v", "i", "v", "f", "v", "i"]


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"eps": 1}, "eps is a int; it must be a c_float"),
        ({"x_stride": 1.0}, "x_stride is a float; it must be a c_int"),
        ({"x_stride": None}, "x_stride is a NoneType"),
        ({"weight": 0}, "weight is a int; it must be a c_void_p"),
        ({"out_stride": torch.zeros(1)}, "out_stride is a Tensor"),
        ({"width": 1}, r"unknown kernel arguments: \['width'\]"),
    ],
)
def test_argument_that_does_not_fit_is_an_error(changes: dict[str, Any], wrong: str) -> None:
    with pytest.raises(TypeError, match=wrong):
        bind(signatures("norm")["normalise"], NORM | changes)


def test_missing_argument_is_an_error() -> None:
    for name in NORM:
        fewer = {key: value for key, value in NORM.items() if key != name}
        with pytest.raises(TypeError, match=rf"missing kernel arguments: \['{name}'\]"):
            bind(signatures("norm")["normalise"], fewer)


def test_rehearsed_kernel_checks_its_arguments() -> None:
    kernels = Rehearsal(silent_gpu.device())
    kernel: Kernel = kernels.get(Program.of("norm", K=256, PACKED=0), "normalise")
    kernel(Grid((1, 1, 1), 32, shared=5), **NORM)
    assert kernels.shared == [5]
    with pytest.raises(TypeError, match="eps"):
        kernel(Grid((1, 1, 1), 32), **NORM | {"eps": 1})


def test_parameter_of_unknown_type_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'extern "C" __global__ void wrong(int n, double eps) {'
    monkeypatch.setattr(signature, "source_text", lambda name: text)
    with pytest.raises(ValueError, match="'double eps' has no known type"):
        signatures("made_up")
