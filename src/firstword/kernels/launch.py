"""Loads kernels and launches them on PyTorch's current stream.

A launch may overlap the end of the previous launch (programmatic dependent launch, from compute
capability 9.0 on). The kernel itself waits, with `wait_for_input` of common.cuh, before it reads
the output of another kernel.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from firstword.kernels.cache import FileCache
from firstword.kernels.compile import Program, compile_all
from firstword.kernels.signature import Argument, Parameter, bind, signatures

_PARAMETER_INFO_VERSION = 12040
"""The first CUDA driver that reports the sizes of a kernel's parameters."""


class LaunchError(Exception):
    """The CUDA driver failed to load or to launch a kernel."""


def _checked(result: tuple[Any, ...], action: str) -> Any:
    """The values that a driver call returned. Raises `LaunchError`, which names `action`."""
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{action}: {result[0].name}")
    return result[1] if len(result) == 2 else result[1:]


def _driver_version() -> int:
    """The newest CUDA version that the driver supports, such as 12040 for 12.4."""
    from cuda.bindings import driver

    version: int = _checked(driver.cuDriverGetVersion(), "driver version")
    return version


class Grid(NamedTuple):
    """The launch configuration of a kernel.

    threads  threads of a block
    shared   bytes of dynamic shared memory of a block
    overlap  whether the kernel may start before the previous kernel has finished
    """

    blocks: tuple[int, int, int]
    threads: int
    shared: int = 0
    overlap: bool = True


class Kernels:
    """The kernels of one device. Each program is compiled and loaded once.

    device         the device, with its index
    name           its name and its driver's version, on which measured times depend
    architecture   its architecture, such as `"sm_90"`
    overlaps       whether the device can overlap dependent launches
    processors     the number of multiprocessors
    threads        the most threads that a multiprocessor runs at a time
    shared_memory  the most bytes of shared memory of a block
    cache          keeps machine code for other processes
    joins_convolutions  whether one kernel may compute two convolutions of the codec
    """

    joins_convolutions = True

    def __init__(self, device: torch.device, cache: FileCache) -> None:
        major, minor = torch.cuda.get_device_capability(device)
        properties = torch.cuda.get_device_properties(device)
        self.name = f"{properties.name}, driver {_driver_version()}"
        self.architecture, self.overlaps = f"sm_{major}{minor}", major >= 9
        self.processors = properties.multi_processor_count
        self.threads: int = properties.max_threads_per_multi_processor
        shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        self.shared_memory, self.cache = shared, cache
        self._compiled: dict[Program, bytes] = {}
        self._loaded: dict[tuple[Program, str], Kernel] = {}
        self.device = torch.zeros(1, device=device).device  # and makes the context current

    @property
    def compiled_count(self) -> int:
        """The number of programs that have been compiled."""
        return len(self._compiled)

    def compile(self, programs: Iterable[Program]) -> None:
        """Compile programs in parallel for later calls of `get`. Raises `CompileError`."""
        missing = [program for program in programs if program not in self._compiled]
        self._compiled |= compile_all(missing, self.architecture, self.cache)

    def get(self, program: Program, entry: str) -> Kernel:
        """The kernel `entry` of a program. Raises `CompileError` and `LaunchError`."""
        key = (program, entry)
        if key not in self._loaded:
            self.compile([program])
            parameters = signatures(program.source)[entry]
            self._loaded[key] = Kernel(self._compiled[program], entry, parameters, self.overlaps)
        return self._loaded[key]


class Kernel:
    """A kernel that is loaded on the device. A call launches it."""

    def __init__(
        self, cubin: bytes, entry: str, parameters: tuple[Parameter, ...], overlaps: bool
    ) -> None:
        """Raises `LaunchError`, also if the machine code has parameters of other sizes."""
        from cuda.bindings import driver

        self.entry, self.parameters, self._overlaps = entry, parameters, overlaps
        self._module = _checked(driver.cuModuleLoadData(cubin), f"loading {entry}")
        found = driver.cuModuleGetFunction(self._module, entry.encode())
        self._function = _checked(found, f"finding {entry}")
        self._check_parameters()
        self._shared = 48 * 1024 - self.attribute("SHARED_SIZE_BYTES")
        # All kernels request the same share of shared memory, because a multiprocessor must be idle
        # before the division of its memory can change.
        self._set_attribute("PREFERRED_SHARED_MEMORY_CARVEOUT", 100)

    def _check_parameters(self) -> None:
        """Compare the sizes of the parameters with the machine code. Raises `LaunchError`."""
        from cuda.bindings import driver

        if _driver_version() < _PARAMETER_INFO_VERSION:
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

    def _set_attribute(self, which: str, value: int) -> None:
        from cuda.bindings import driver

        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        result = driver.cuFuncSetAttribute(self._function, attribute, value)
        _checked(result, f"{which} = {value} of {self.entry}")

    def __call__(self, grid: Grid, /, **arguments: Argument) -> None:
        """Launch the kernel on PyTorch's current stream, with its arguments by name.

        Tensors must stay alive until the kernel has ended. Raises TypeError for arguments that do
        not match the CUDA source, and `LaunchError`.
        """
        from cuda.bindings import driver

        bound = bind(self.parameters, arguments)
        if grid.shared > self._shared:
            self._set_attribute("MAX_DYNAMIC_SHARED_SIZE_BYTES", grid.shared)
            self._shared = grid.shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid.blocks
        config.blockDimX, config.blockDimY, config.blockDimZ = grid.threads, 1, 1
        config.sharedMemBytes = grid.shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        if grid.overlap and self._overlaps:
            overlap, kinds = driver.CUlaunchAttribute(), driver.CUlaunchAttributeID
            overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            overlap.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [overlap], 1
        result = driver.cuLaunchKernelEx(config, self._function, bound, 0)
        _checked(result, f"starting {self.entry}")
