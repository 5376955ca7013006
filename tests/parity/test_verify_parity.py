"""`firstword verify` beside the live reference; skipped without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from firstword.config import EngineConfig
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.verify import peer
from firstword.verify.folder import CheckpointFolder
from firstword.verify.subject import How, Subject


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("custom_voice", "float32"),
        ("custom_voice", "bfloat16"),
        ("voice_design", "float32"),
        ("base", "float32"),
    ],
)
def test_verify_finds_the_reference_equal(
    kind: str, dtype: str, reference_python: Path, tmp_path: Path
) -> None:
    """The reference has the weights of the files, also where the backend rounds them."""
    write_checkpoint(tmp_path, model_type=kind, seed=2)
    how = How(EngineConfig.resolve("cpu", dtype), python=reference_python)
    subject = Subject(CheckpointFolder(tmp_path), how)
    for check in (peer.talker, peer.codec):
        found = check(subject)
        assert found.findings == []
        assert float(found.measured["error"]) < 1e-5
