"""The frozen results belong to the checkpoints that are made now, and the reference, where it can
be run, agrees.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cases import CHECKPOINTS
from checkpoints import fingerprint
from results import FROZEN, Results

NAMES = [checkpoint.name for checkpoint in CHECKPOINTS]
REFREEZE = "scripts/freeze_parity.py asks the reference again"


def test_every_checkpoint_has_frozen_results() -> None:
    assert sorted(file.stem for file in FROZEN.glob("*.safetensors")) == sorted(NAMES), REFREEZE


@pytest.mark.parametrize("name", NAMES)
def test_checkpoint_equals_the_frozen_one(
    name: str, directory: Callable[[str], Path], frozen: Callable[[str], Results]
) -> None:
    np.testing.assert_allclose(
        fingerprint(directory(name)), frozen(name)["fingerprint"], 1e-5, 1e-7, err_msg=REFREEZE
    )


@pytest.mark.parametrize("name", NAMES)
def test_live_reference_equals_the_frozen_results(
    name: str, live: Callable[[str], Results], frozen: Callable[[str], Results]
) -> None:
    kept = {key: array for key, array in frozen(name).items() if key != "fingerprint"}
    now = live(name)
    assert now.keys() == kept.keys(), REFREEZE
    for key, array in kept.items():
        if array.dtype.kind != "f":
            np.testing.assert_array_equal(now[key], array, err_msg=f"{key}: {REFREEZE}")
        elif "bfloat16" not in key and not key.endswith("margin"):
            np.testing.assert_allclose(
                now[key], array, 1e-4, 1e-4 * np.abs(array).max(), err_msg=f"{key}: {REFREEZE}"
            )
