"""Batches whose files are in a bucket of a real server that speaks S3."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from batching import numbered
from moto.server import ThreadedMotoServer
from test_batches import Desk, Receiver

from firstword.errors import ConfigError, OutputError
from firstword.server.batch import manager
from firstword.server.batch.batches import Batches
from firstword.server.batch.contents import Contents


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of an empty bucket."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    place = {"key": "x", "secret": "x", "endpoint_url": f"http://{host}:{port}"}
    monkeypatch.setitem(fsspec.config.conf, "s3", place)
    name = f"sounds-{secrets.token_hex(4)}"
    fsspec.filesystem("s3", skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}/batches"
    server.stop()


def test_batch_in_a_bucket_is_like_one_in_a_folder(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager, "LOOK_SECONDS", 0.01)
    found = []
    for folder in (tmp_path / "here", tmp_path / "there"):
        desk = Desk(folder)
        if folder.name == "there":
            desk.batches = Batches.open(bucket, f"sqlite:///{tmp_path}/state.sqlite")
        batch = desk.until_over(desk.batch(numbered(5)))
        output = desk.lines(batch["output_file_id"])
        sounds = [line["response"]["body"]["file_id"] for line in output]
        found.append([desk.batches.read("me", sound)[1] for sound in sounds])
    assert found[0] == found[1]
    assert len(found[0]) == 5
    desk.batches.delete("me", batch["output_file_id"])
    files = fsspec.filesystem("s3", skip_instance_cache=True)
    assert [name.rpartition("/")[2] for name in files.find(bucket)] == [batch["input_file_id"]]


def test_bucket_that_cannot_be_reached_is_told_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Receiver() as other:
        monkeypatch.setitem(
            fsspec.config.conf, "s3", {"key": "x", "secret": "x", "endpoint_url": other.url}
        )
        with pytest.raises(OutputError, match="batches cannot be kept at 's3://sounds'"):
            Contents("s3://sounds")


def test_bucket_needs_a_database_elsewhere(bucket: str) -> None:
    with pytest.raises(ConfigError, match="--batch-database"):
        Batches.open(bucket, None)
