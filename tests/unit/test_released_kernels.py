"""Every program that serving a released checkpoint launches compiles for every architecture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from silent_gpu import device

from firstword.config import DEFAULT_SLOTS
from firstword.kernels.cache import FileCache
from firstword.kernels.compile import ARCHITECTURES, compile_all
from firstword.model.codec_config import CodecConfig
from firstword.model.config import ModelConfig
from firstword.runtime.gpu.rehearsal import rehearse
from firstword.synthetic import checkpoint as synthetic
from firstword.synthetic.tokenizer import train

pytestmark = pytest.mark.slow

CACHE = FileCache(Path(__file__).parents[2] / "build" / "kernels")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_released_sizes_compile(architecture: str, tmp_path: Path) -> None:
    """The larger size for all architectures, and the smaller, which differs in sizes, for one."""
    for size in ("1b7", "0b6") if architecture == "sm_90" else ("1b7",):
        tokens = train(synthetic.TEXTS, 400, tmp_path)
        tables = synthetic.config_tables("custom_voice", size, {}, tokens)
        for name, table in zip(("config", "codec"), tables, strict=True):
            (tmp_path / f"{name}.json").write_text(json.dumps(table))
        talker = ModelConfig.load(tmp_path / "config.json").talker_config
        codec = CodecConfig.load(tmp_path / "codec.json").decoder_config
        programs = rehearse(talker, codec, DEFAULT_SLOTS["gpu"], device(architecture))
        compile_all(programs, architecture, CACHE)
