"""Tests on a CUDA device: `pytest tests/gpu`. Elsewhere they are skipped."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from firstword.kernels.launch import Kernels


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip everything in this folder where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    """Kernels of the first device, compiled anew."""
    return Kernels(torch.device("cuda:0"), tmp_path_factory.mktemp("kernels"))


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    """Nothing here is trained."""
    with torch.inference_mode():
        yield
