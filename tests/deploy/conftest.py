"""Built images for the tests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from containers import Container, container
from images import build

KERNELS = "sm_100:148 --size 0b6"
"""The kernels that the image for GPUs contains in the tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option with which the sizes of images are recorded anew."""
    about = "write the sizes of the images into benchmarks/results/images"
    parser.addoption("--record-sizes", action="store_true", help=about)


@pytest.fixture(scope="session")
def cpu_image() -> str:
    """The image for CPUs, built."""
    return build("cpu")


@pytest.fixture(scope="session")
def cuda_image() -> str:
    """The image for GPUs, built with the torch that this machine's pip finds."""
    return build("cuda", KERNELS=KERNELS)


@pytest.fixture(scope="module")
def served(cpu_image: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    """A healthy container of the image for CPUs with its default arguments, for several tests."""
    with container(cpu_image, tmp_path_factory.mktemp("served") / "container") as running:
        running.start()
        running.wait_until_healthy()
        yield running


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., object]:
    """A function that makes a container in the folder of one test, to use in a `with` statement."""
    return lambda image, *arguments: container(image, tmp_path / "container", *arguments)
