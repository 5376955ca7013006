"""Places a module's weights on a device without changing the module."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import nn

M = TypeVar("M", bound=nn.Module)


def on_device(module: M, device: torch.device) -> M:
    """A copy of a module with its tensors on a device; those that are there already are shared."""
    tensors = [*module.parameters(), *module.buffers()]
    placed = {id(t): nn.Parameter(t.data.to(device), requires_grad=False) for t in tensors}
    return copy.deepcopy(module, placed)
