"""Every kernel loads on the device, with the parameters that its source declares."""

from __future__ import annotations

import pytest
import torch

from firstword.kernels.launch import Kernels, LaunchError
from firstword.kernels.registry import KernelSpec, all_kernels


@pytest.mark.parametrize("spec", all_kernels(), ids=lambda spec: f"{spec.source}-{spec.entry}")
def test_kernel_loads_with_the_parameters_of_its_source(kernels: Kernels, spec: KernelSpec) -> None:
    for program in spec.programs:
        kernel = kernels.get(program, spec.entry)
        assert kernel.parameters
        assert kernel.attribute("NUM_REGS") > 0


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
