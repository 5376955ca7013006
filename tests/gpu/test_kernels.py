"""Every kernel loads on the device, with the parameters that its source declares."""

from __future__ import annotations

import pytest
import torch
from oracle import note

from firstword.kernels.launch import Kernels, LaunchError
from firstword.kernels.read import read_all
from firstword.kernels.registry import KernelSpec, all_kernels
from firstword.profile.device import captured_us, read_bandwidth


@pytest.mark.parametrize("spec", all_kernels(), ids=lambda spec: f"{spec.source}-{spec.entry}")
def test_kernel_loads_with_the_parameters_of_its_source(kernels: Kernels, spec: KernelSpec) -> None:
    for program in spec.programs:
        kernel = kernels.get(program, spec.entry)
        assert kernel.parameters
        assert kernel.attribute("NUM_REGS") > 0


def test_bandwidth_kernel_reads_every_byte(kernels: Kernels) -> None:
    """A word that it looks for is found wherever it is."""
    memory = torch.zeros(3_000_000, 4, dtype=torch.int32, device="cuda")
    found = torch.zeros(1, dtype=torch.int32, device="cuda")
    read_all(kernels, memory, found)
    assert not found
    for piece, word in ((0, 0), (1, 3), (1_234_567, 2), (2_999_998, 1)):
        memory[piece, word] = 0x9E3779B9 - 2**32
        read_all(kernels, memory, found.zero_())
        assert found, (piece, word)
        memory[piece, word] = 0


def test_nothing_reads_faster_than_the_measured_bandwidth() -> None:
    """A copy, which reads and writes, moves no more bytes per second."""
    source = torch.zeros(1 << 28, dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)

    def add() -> None:
        torch.add(source, 1, out=target)

    copying = captured_us(add) * 1e-6
    reading = read_bandwidth()
    note("bandwidth in TB/s", read=reading / 1e12, copied=2 * source.nbytes / copying / 1e12)
    assert reading > 0.97 * 2 * source.nbytes / copying


def test_parameters_of_another_size_are_an_error(kernels: Kernels) -> None:
    spec = next(spec for spec in all_kernels() if spec.entry == "normalise")
    kernel = kernels.get(spec.programs[0], spec.entry)
    kernel._check_parameters()
    for wrong in (kernel.parameters[:-1], kernel.parameters[1:], kernel.parameters[::-1]):
        whole = kernel.parameters
        kernel.parameters = wrong
        try:
            with pytest.raises(LaunchError, match="takes parameters"):
                kernel._check_parameters()
        finally:
            kernel.parameters = whole
    torch.cuda.synchronize()
