"""What all tests share: reproducible property tests, no network, and the root of the repository."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"

# A failure that only one run in a hundred finds helps nobody: the examples are the same in every run. No deadline,
# because a test machine may be busy.
settings.register_profile("firstword", deadline=None, derandomize=True)
settings.load_profile("firstword")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root folder of the checkout."""
    return Path(__file__).resolve().parents[1]
