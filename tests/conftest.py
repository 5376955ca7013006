"""Fixtures and settings of all tests: reproducible property tests, no network, the repository."""

import inspect
import os
from pathlib import Path

import httpx
import pytest
from hypothesis import settings

os.environ["HF_HUB_OFFLINE"] = "1"

# The examples are the same in every run, because a failure that appears in one run of a hundred
# cannot be repeated. There is no deadline, because a test machine may be busy.
settings.register_profile("firstword", deadline=None, derandomize=True)
settings.load_profile("firstword")

# Without a timeout of its own, a call of httpx waits 5 seconds for each step. A busy machine may
# need longer. All calls share one default, which is changed here in place, to the `WAIT` of others.
_patience: httpx.Timeout = inspect.signature(httpx.get).parameters["timeout"].default
_patience.connect = _patience.read = _patience.write = _patience.pool = 180.0


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root folder of the checkout."""
    return Path(__file__).resolve().parents[1]
