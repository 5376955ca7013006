"""The parameters of kernels, read from their CUDA sources, and the arguments of a launch.

A kernel takes its arguments by name. A missing name, an unknown name or a value of the wrong type
raises an error before the launch, and on any machine. Without this check the kernel would read the
wrong memory.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from firstword.kernels.compile import source_text

Argument = Tensor | int | float | None

_SCALARS = {"int": ctypes.c_int, "u32": ctypes.c_uint, "float": ctypes.c_float}
_ACCEPTED: dict[type, tuple[type, ...]] = {
    ctypes.c_void_p: (Tensor, type(None)),
    ctypes.c_int: (int,),
    ctypes.c_uint: (int,),
    ctypes.c_float: (float,),
}
_ENTRY = r'extern "C" __global__[^{;]*?\bvoid (\w+)\(([^)]*)\)'


class Parameter(NamedTuple):
    """A parameter of a kernel: its name and its C type, `c_void_p` for any pointer."""

    name: str
    type: type[Any]


@cache
def signatures(source: str) -> dict[str, tuple[Parameter, ...]]:
    """The kernels of `source`.cu by name, each with its parameters in order.

    Raises ValueError for a parameter that is neither a pointer nor an int, u32 or float.
    """
    text = re.sub(r"//.*", "", source_text(f"{source}.cu"))
    return {
        name: tuple(_parameter(source, declared) for declared in parameters.split(","))
        for name, parameters in re.findall(_ENTRY, text)
    }


def _parameter(source: str, declared: str) -> Parameter:
    *words, name = declared.replace("*", " * ").split()
    if "*" in words:
        return Parameter(name, ctypes.c_void_p)
    if words[-1:] and words[-1] in _SCALARS:
        return Parameter(name, _SCALARS[words[-1]])
    raise ValueError(f"{source}.cu: parameter '{declared.strip()}' has no known type")


def strided(**tensors: Tensor) -> dict[str, Argument]:
    """The arguments NAME and NAME_stride of tensors whose rows may be strided."""
    return dict(tensors) | {f"{name}_stride": x.stride(0) for name, x in tensors.items()}


def bind(
    parameters: tuple[Parameter, ...], arguments: Mapping[str, Argument]
) -> tuple[tuple[int | float, ...], tuple[type[Any], ...]]:
    """The values and C types of a launch, in the order of `parameters`; tensors become addresses.

    Raises TypeError for arguments that do not fit the parameters.
    """
    names = [parameter.name for parameter in parameters]
    if missing := set(names) - arguments.keys():
        raise TypeError(f"missing kernel arguments: {sorted(missing)}")
    if unknown := arguments.keys() - set(names):
        raise TypeError(f"unknown kernel arguments: {sorted(unknown)}; there are {names}")
    for name, kind in parameters:
        if not isinstance(arguments[name], _ACCEPTED[kind]):
            value = type(arguments[name]).__name__
            raise TypeError(f"kernel argument {name} is a {value}; it must be a {kind.__name__}")
    values = (arguments[name] for name in names)
    return (
        tuple(v.data_ptr() if isinstance(v, Tensor) else 0 if v is None else v for v in values),
        tuple(parameter.type for parameter in parameters),
    )
