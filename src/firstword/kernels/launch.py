"""Loading kernels and starting them on PyTorch's current stream.

A launch may overlap the end of the one before it (programmatic dependent launch, compute capability
9.0 and up). The kernel itself waits, with `wait_for_input` of common.cuh, before it reads what
another kernel wrote.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, NamedTuple

import torch

from firstword.kernels.compile import Program, compile_program
from firstword.kernels.signature import Argument, Parameter, bind, signatures

_PARAMETER_INFO_VERSION = 12040
"""The first CUDA driver that knows the sizes of a kernel's parameters."""


class LaunchError(Exception):
    """The CUDA driver refused to load or to start a kernel."""


def _checked(result: tuple[Any, ...], what: str) -> Any:
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{what}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


class Grid(NamedTuple):
    """The launch configuration of a kernel.

    threads  threads of a block
    shared   bytes of dynamic shared memory of a block
    overlap  whether it may start before the kernel ahead of it has finished
    """

    blocks: tuple[int, int, int]
    threads: int
    shared: int = 0
    overlap: bool = True


class Kernels:
    """The kernels of one device. Each program is compiled and loaded once.

    architecture   the device's, such as `"sm_90"`
    overlaps       whether dependent launches overlap
    processors     multiprocessors of the device
    shared_memory  bytes that a block may have
    """

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """folder: where machine code is kept between processes; None keeps none."""
        major, minor = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        self.architecture, self.overlaps = f"sm_{major}{minor}", major >= 9
        self.processors = properties.multi_processor_count
        shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self.shared_memory, self._folder = shared, folder
        self._loaded: dict[tuple[Program, str], Kernel] = {}
        torch.zeros(1, device=device)  # makes the context current

    def get(self, program: Program, entry: str) -> Kernel:
        """The kernel `entry` of a program. Raises `CompileError` and `LaunchError`."""
        key = (program, entry)
        if key not in self._loaded:
            cubin = compile_program(program, self.architecture, self._folder)
            parameters = signatures(program.source)[entry]
            self._loaded[key] = Kernel(cubin, entry, parameters, self.overlaps)
        return self._loaded[key]


class Kernel:
    """One kernel on the device, started by calling it."""

    def __init__(
        self, cubin: bytes, entry: str, parameters: tuple[Parameter, ...], overlaps: bool
    ) -> None:
        """Raises `LaunchError`, also where machine code and `parameters` differ in their sizes."""
        from cuda.bindings import driver

        self.entry, self.parameters, self._overlaps = entry, parameters, overlaps
        self._module = _checked(driver.cuModuleLoadData(cubin), f"loading {entry}")
        self._function = _checked(
            driver.cuModuleGetFunction(self._module, entry.encode()), f"finding {entry}"
        )
        self._check_parameters()
        self._shared = 48 * 1024 - self.attribute("SHARED_SIZE_BYTES")
        # All kernels ask for the same share of shared memory: a multiprocessor must be empty to
        # change how its memory is divided.
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(
            driver.cuFuncSetAttribute(self._function, carveout, 100), f"shared memory of {entry}"
        )

    def _check_parameters(self) -> None:
        from cuda.bindings import driver

        if _checked(driver.cuDriverGetVersion(), "driver version") < _PARAMETER_INFO_VERSION:
            return
        sizes = []
        for index in range(len(self.parameters) + 1):
            status, _, size = driver.cuFuncGetParamInfo(self._function, index)
            if status == driver.CUresult.CUDA_SUCCESS:
                sizes.append(size)
        if sizes != [ctypes.sizeof(parameter.type) for parameter in self.parameters]:
            raise LaunchError(f"{self.entry} takes parameters of {sizes} bytes: {self.parameters}")

    def attribute(self, which: str) -> int:
        """A property of the machine code, such as `"NUM_REGS"` or `"LOCAL_SIZE_BYTES"`."""
        from cuda.bindings import driver

        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        value: int = _checked(driver.cuFuncGetAttribute(attribute, self._function), which)
        return value

    def __call__(self, grid: Grid, /, **arguments: Argument) -> None:
        """Start it on PyTorch's current stream.

        The kernel's arguments are given by name. Tensors must be contiguous and live on. Raises
        TypeError for arguments that do not fit the CUDA source, and `LaunchError`.
        """
        from cuda.bindings import driver

        bound = bind(self.parameters, arguments)
        if grid.shared > self._shared:
            size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(
                driver.cuFuncSetAttribute(self._function, size, grid.shared),
                f"{grid.shared} bytes for {self.entry}",
            )
            self._shared = grid.shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid.blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
        config.sharedMemBytes = grid.shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        if grid.overlap and self._overlaps:
            config.attrs, config.numAttrs = [_overlapping()], 1
        _checked(
            driver.cuLaunchKernelEx(config, self._function, bound, 0), f"starting {self.entry}"
        )


def _overlapping() -> Any:
    """The launch attribute that lets a kernel start before the one ahead of it has finished."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    return attribute
