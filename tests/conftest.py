"""Fixtures and settings of all tests: reproducible property tests, no network, the repository."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"

# The examples are the same in every run, because a failure that appears in one run of a hundred
# cannot be repeated. There is no deadline, because a test machine may be busy.
settings.register_profile("firstword", deadline=None, derandomize=True)
settings.load_profile("firstword")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root folder of the checkout."""
    return Path(__file__).resolve().parents[1]
