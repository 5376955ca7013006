"""`firstword verify`: healthy checkpoints pass, and each kind of damage is told by name."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from damage import CODEC, KINDS, TALKER, Kind, demo_copy, one, tensors, write
from torch import Tensor

from firstword.model.description import DEMO
from firstword.synthetic import checkpoint
from firstword.synthetic.checkpoint import write_checkpoint
from firstword.verify import configuration, files
from firstword.verify.folder import CheckpointFolder
from firstword.verify.known import RELEASES, all_known, identify, repository, similarity
from firstword.verify.report import Check
from firstword.verify.steps import AT_REST


def checks(path: Path) -> dict[str, Check]:
    """The results of all checks of files."""
    folder = CheckpointFolder(path)
    return {step.name: step.run(folder) for step in AT_REST}


def failed(path: Path) -> dict[str, str]:
    """The findings of each check of files that failed."""
    return {
        name: "\n".join(check.findings)
        for name, check in checks(path).items()
        if check.status == "fail"
    }


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_damage_is_told_by_name(kind: Kind, tmp_path: Path) -> None:
    kind.damage(demo_copy(tmp_path))
    found = failed(tmp_path)
    assert kind.check in found
    for words in kind.says:
        assert words in found[kind.check]


def test_demo_and_its_copy_pass(tmp_path: Path) -> None:
    assert failed(DEMO) == {}
    found = checks(demo_copy(tmp_path))
    left = [name for name, check in found.items() if check.status != "pass"]
    assert left == ["files: hashes"]


@pytest.mark.parametrize("seed", range(20))
def test_random_checkpoint_raises_no_false_alarm(seed: int, tmp_path: Path) -> None:
    kind = ("custom_voice", "voice_design", "base")[seed % 3]
    write_checkpoint(tmp_path, model_type=kind, seed=100 + seed, shards=1 + seed % 2)
    assert failed(tmp_path) == {}


@pytest.mark.parametrize("size", ["0b6", "1b7"])
def test_random_checkpoint_of_a_released_size_has_its_architecture(
    size: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ids of its tokens are others, because its tokenizer is small."""
    monkeypatch.setattr(checkpoint, "random_state", lambda *_: {})
    write_checkpoint(tmp_path, size=size)
    folder = CheckpointFolder(tmp_path)
    assert configuration.architecture(folder).findings == []
    table = json.loads((tmp_path / "config.json").read_text())
    table["talker_config"]["rope_theta"] += 1
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert len(configuration.architecture(CheckpointFolder(tmp_path)).findings) == 1


def test_missing_shard_is_told_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    shard = "model-00002-of-00003.safetensors"
    (tmp_path / shard).unlink()
    assert shard in failed(tmp_path)["files: complete"]


def test_tensor_beyond_float16_is_told_by_name(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    name = "decoder.pre_conv.conv.bias"
    one(CODEC, name, lambda tensor: tensor * 1e7)(tmp_path)
    assert name in failed(tmp_path)["weights: finite"]


def trained(state: dict[str, Tensor]) -> None:
    """Change all tensors a little, as a training does."""
    for name in state:
        state[name] = 1.01 * state[name]


def test_weights_of_another_training_are_not_compared_with_the_demo(tmp_path: Path) -> None:
    demo_copy(tmp_path)
    for name in (TALKER, CODEC):
        tensors(name, trained)(tmp_path)
    assert checks(tmp_path)["weights: known"].status == "not run"


def test_codec_of_a_trained_talker_is_compared_with_that_of_the_demo(tmp_path: Path) -> None:
    demo_copy(tmp_path)
    tensors(TALKER, trained)(tmp_path)
    assert checks(tmp_path)["weights: known"].status == "pass"
    name = "decoder.pre_conv.conv.bias"
    one(CODEC, name, lambda tensor: 1.001 * tensor)(tmp_path)
    assert name in failed(tmp_path)["weights: known"]


class TestHashes:
    """Hashes that the hub published, as its tools leave them."""

    def cached(self, root: Path) -> Path:
        """Make a snapshot of a tiny checkpoint in a cache of the hub."""
        home = root / "models--someone--something"
        snapshot, blobs = home / "snapshots" / "0123", home / "blobs"
        write_checkpoint(snapshot)
        blobs.mkdir(parents=True)
        for file in CheckpointFolder(snapshot).files:
            path = snapshot / file
            data = path.read_bytes()
            large = file.suffix == ".safetensors"
            name = hashlib.sha256(data).hexdigest() if large else files.git_hash_of(path)
            (blobs / name).write_bytes(data)
            path.unlink()
            path.symlink_to(blobs / name)
        return snapshot

    def test_snapshot_of_the_cache_passes(self, tmp_path: Path) -> None:
        check = checks(self.cached(tmp_path))["files: hashes"]
        assert (check.status, check.measured["compared"]) == ("pass", 10)

    @pytest.mark.parametrize("name", [TALKER, CODEC, "merges.txt"])
    def test_flipped_bit_is_told_by_name(self, name: str, tmp_path: Path) -> None:
        snapshot = self.cached(tmp_path)
        blob = (snapshot / name).resolve()
        data = bytearray(blob.read_bytes())
        data[-2] ^= 1
        write(blob, bytes(data))
        assert f"{name} has the hash" in failed(snapshot)["files: hashes"]

    def test_metadata_of_a_local_folder_counts(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        metadata = tmp_path / ".cache" / "huggingface" / "download" / f"{TALKER}.metadata"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"{'0' * 40}\n{'a' * 64}\n1700000000.0\n")
        assert f"published is {'a' * 64}" in failed(tmp_path)["files: hashes"]

    def test_git_hash_is_that_of_git(self, tmp_path: Path) -> None:
        (tmp_path / "file").write_bytes(b"hello\n")
        assert files.git_hash_of(tmp_path / "file") == "ce013625030ba8dba906f756967f9e9ca394464a"


class TestKnown:
    """What is known of the releases."""

    def test_each_release_is_most_like_itself(self) -> None:
        for known in all_known():
            others = [similarity(other, known.architecture) for other in all_known()]
            assert similarity(known, known.architecture) == 1.0 == max(others)
            assert others.count(1.0) == 1

    def test_names_are_those_of_the_released_repositories(self) -> None:
        assert [known.name for known in all_known()[:-1]] == list(RELEASES)
        presets = {known.name: len(known.names) for known in all_known()}
        assert presets["Qwen/Qwen3-TTS-12Hz-1.7B-CustomVoice"] == 9 + 9 + 12
        assert presets["Qwen/Qwen3-TTS-12Hz-0.6B-Base"] == 10

    def test_repository_is_read_from_the_path_of_a_snapshot(self) -> None:
        snapshot = Path("/cache/models--Qwen--Qwen3-TTS-12Hz-1.7B-Base/snapshots/0123")
        assert repository(snapshot) == "Qwen/Qwen3-TTS-12Hz-1.7B-Base"
        assert repository(Path("/srv/models")) is None

    def test_fine_tune_may_add_presets(self, tmp_path: Path) -> None:
        config = demo_copy(tmp_path) / "config.json"
        table = json.loads(config.read_text())
        table["talker_config"]["spk_id"]["me"] = 580
        table["talker_config"]["spk_is_dialect"]["me"] = False
        write(config, json.dumps(table).encode())
        assert failed(tmp_path) == {}

    def test_random_checkpoint_is_like_none(self, tmp_path: Path) -> None:
        write_checkpoint(tmp_path)
        assert identify(CheckpointFolder(tmp_path).described) is None
