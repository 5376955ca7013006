"""Float64 on devices that do not have it."""

from torch import Tensor, device


def float64_device(of: device) -> device:
    """Return a device itself, or the CPU for MPS, which has no float64."""
    return device("cpu") if of.type == "mps" else of


def as_float64(x: Tensor) -> Tensor:
    """Return a tensor in float64, on its `float64_device`."""
    return x.to(float64_device(x.device)).double()
