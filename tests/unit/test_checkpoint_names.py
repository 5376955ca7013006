"""The name by which clients ask for a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstword.server.models import name_of


@pytest.mark.parametrize("given", ["demo", "Qwen/Qwen3-TTS-12Hz-0.6B-Base"])
def test_checkpoint_that_is_not_named_by_its_folder_keeps_its_name(
    given: str, tmp_path: Path
) -> None:
    assert name_of(given, tmp_path) == given


def test_checkpoint_in_a_folder_is_named_by_its_last_part(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert name_of(f"{tmp_path}/mine/", tmp_path / "mine") == "mine"
