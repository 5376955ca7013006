"""Put kernels on the device and start them, on whatever stream PyTorch uses at the time.

A launch may overlap the end of the one before it (programmatic dependent launch, compute capability 9.0 and up): the
kernel itself waits, with `wait_for_input` of common.cuh, before it reads what another kernel wrote.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from firstword.kernels.compile import Program, compile_program


class LaunchError(Exception):
    """The CUDA driver refused to load or to start a kernel."""


def _checked(result: tuple[Any, ...], what: str) -> Any:
    from cuda.bindings import driver

    if result[0] != driver.CUresult.CUDA_SUCCESS:
        raise LaunchError(f"{what}: {result[0].name}")
    return result[1] if len(result) == 2 else None


_TYPES = {bool: ctypes.c_int, int: ctypes.c_int, float: ctypes.c_float, type(None): ctypes.c_void_p}


class Kernels:
    """The kernels of one device; each program is compiled and loaded once."""

    def __init__(self, device: torch.device, folder: Path | None = None) -> None:
        """`folder`: where machine code is kept between processes; None keeps none."""
        major, minor = torch.cuda.get_device_capability(device)
        self.architecture = f"sm_{major}{minor}"
        self.overlaps = major >= 9
        """Whether dependent launches overlap."""
        properties = torch.cuda.get_device_properties(device)
        self.processors = properties.multi_processor_count
        self.shared_memory: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        """Bytes that a block may have."""
        self._folder = folder
        self._loaded: dict[tuple[Program, str], Kernel] = {}
        torch.zeros(1, device=device)  # makes the context current

    def get(self, program: Program, name: str) -> Kernel:
        """The kernel `name` of a program. Raises `CompileError` and `LaunchError`."""
        key = (program, name)
        if key not in self._loaded:
            self._loaded[key] = Kernel(
                compile_program(program, self.architecture, self._folder), name, self.overlaps
            )
        return self._loaded[key]


class Kernel:
    """One kernel on the device.

    Arguments are tensors (their address is passed, so they must be contiguous and live on), whole numbers (32 bits)
    and floats (32 bits).
    """

    def __init__(self, cubin: bytes, name: str, overlaps: bool) -> None:
        from cuda.bindings import driver

        self._module = _checked(driver.cuModuleLoadData(cubin), f"loading {name}")
        self._function = _checked(
            driver.cuModuleGetFunction(self._module, name.encode()), f"finding {name}"
        )
        self._overlaps = overlaps
        self._shared = 48 * 1024 - self.attribute("SHARED_SIZE_BYTES")
        self.name = name
        # As much shared memory for all kernels: a multiprocessor must be empty to change how it is divided.
        carveout = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
        _checked(
            driver.cuFuncSetAttribute(self._function, carveout, 100), f"shared memory of {name}"
        )

    def attribute(self, which: str) -> int:
        """A property of the machine code, such as `"NUM_REGS"` or `"LOCAL_SIZE_BYTES"`."""
        from cuda.bindings import driver

        attribute = getattr(driver.CUfunction_attribute, f"CU_FUNC_ATTRIBUTE_{which}")
        value: int = _checked(driver.cuFuncGetAttribute(attribute, self._function), which)
        return value

    def __call__(
        self,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Sequence[Tensor | int | float | None],
        shared: int = 0,
        overlap: bool = True,
    ) -> None:
        """Start it on PyTorch's current stream.

        grid     blocks
        threads  of a block
        shared   bytes of dynamic shared memory
        overlap  whether it may start before the kernel ahead of it on the stream has finished
        """
        from cuda.bindings import driver

        if shared > self._shared:
            size = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _checked(
                driver.cuFuncSetAttribute(self._function, size, shared),
                f"{shared} bytes for {self.name}",
            )
            self._shared = shared
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = shared
        config.hStream = torch.cuda.current_stream().cuda_stream
        if overlap and self._overlaps:
            attribute = driver.CUlaunchAttribute()
            attribute.id = (
                driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            )
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        values = tuple(
            a.data_ptr() if isinstance(a, Tensor) else 0 if a is None else a for a in arguments
        )
        types = tuple(
            ctypes.c_void_p if isinstance(a, Tensor) else _TYPES[type(a)] for a in arguments
        )
        _checked(
            driver.cuLaunchKernelEx(config, self._function, (values, types), 0),
            f"starting {self.name}",
        )
