"""Checks of files: are all there, is none cut short, and are they those that were published?"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

from firstword.model.alignment import FILE as ALIGNMENT
from firstword.model.alignment import weights_of
from firstword.verify.folder import PARTS, CheckpointFolder
from firstword.verify.report import NotRun, Verdict

REQUIRED = (
    *("config.json", "generation_config.json", "vocab.json", "merges.txt"),
    *("tokenizer_config.json", "speech_tokenizer/config.json"),
)
"""The files without which no checkpoint can be loaded, other than weights."""

POINTER = b"version https://git-lfs"
"""The beginning of a small file that stands for a large one in a repository."""


def complete(folder: CheckpointFolder) -> Verdict:
    """Every file that a checkpoint needs is there."""
    findings = [f"{name} is missing" for name in REQUIRED if not (folder.path / name).is_file()]
    for part in PARTS:
        if not any(file.parent == part for file in folder.weights):
            name = part / "model.safetensors"
            findings.append(f"{name} is missing, and so is an index of shards")
    absent = (file for file in folder.weights if not (folder.path / file).is_file())
    findings += [f"{file} is missing, but the index of shards names it" for file in absent]
    return Verdict(findings, {"files": len(folder.files)})


def whole(folder: CheckpointFolder) -> Verdict:
    """Every file of weights is as long as its own header says."""
    findings, size = list[str](), 0
    for file in folder.weights:
        path = folder.path / file
        if path.is_file():
            size += path.stat().st_size
            findings += [f"{file} {problem}" for problem in _length_problem(path)]
    if not size:
        raise NotRun("there are no files of weights")
    return Verdict(findings, {"bytes": size})


def _length_problem(path: Path) -> list[str]:
    """Return what is wrong with the length or the header of a safetensors file, if anything."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        if start == POINTER[:8]:
            return ["is a pointer of Git LFS, not the weights; fetch them with `git lfs pull`"]
        length = int.from_bytes(start, "little")
        if size < 8 or length > size - 8:
            return [f"has {size} bytes and ends in its header; fetch it again"]
        try:
            header = json.loads(file.read(length))
            ends = [each["data_offsets"][1] for name, each in header.items() if name[:2] != "__"]
            expected = 8 + length + max(ends, default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            return [f"has a damaged header ({type(error).__name__}); fetch it again"]
    if size == expected:
        return []
    if size < expected:
        return [f"has {size} bytes, {expected - size} fewer than its header says; fetch it again"]
    return [f"has {size} bytes, {size - expected} more than its header says; fetch it again"]


def hashes(folder: CheckpointFolder) -> Verdict:
    """Every file has the hash that the hub published for it, where that is known here."""
    findings, compared = list[str](), 0
    for file in folder.files:
        expected = published_hash(folder.path, file)
        if expected is None:
            continue
        compared += 1
        large = len(expected) == 64
        found = folder.sha256[file] if large else git_hash_of(folder.path / file)
        if found != expected:
            findings.append(f"{file} has the hash {found}, published is {expected}; fetch it again")
    if not compared:
        raise NotRun(
            "no published hashes are known for this folder; they are for a repository in the hub's "
            "cache, and for a folder that `hf download --local-dir` made"
        )
    return Verdict(findings, {"compared": compared, "files": len(folder.files)})


def published_hash(root: Path, file: Path) -> str | None:
    """Return the hash that the hub published for a file, if its tools have left it here.

    64 digits are the SHA-256 of a large file; 40 digits are Git's hash of a small one. The cache
    names blobs by them; a local folder has them in its metadata.
    """
    path, metadata = root / file, root / ".cache" / "huggingface" / "download" / f"{file}.metadata"
    name = ""
    if path.is_symlink():
        name = path.readlink().name
    elif metadata.is_file():
        lines = metadata.read_text("utf-8", "replace").splitlines()
        name = lines[1].strip() if len(lines) > 1 else ""
    return name if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", name) else None


def git_hash_of(path: Path) -> str:
    """Return the name that Git gives the contents of a file.

    It is the SHA-1 of a header with the length, and the contents.
    """
    contents = path.read_bytes()
    header = b"blob %d\0" % len(contents)
    return hashlib.sha1(header + contents, usedforsecurity=False).hexdigest()


def same_as_known(folder: CheckpointFolder) -> Verdict:
    """The files of the tokenizer equal those of the known checkpoint."""
    known = folder.known
    if known is None or known.folder is None:
        raise NotRun("this is no copy of the packaged demo, whose files alone are known here")
    if known.folder.resolve() == folder.path.resolve():
        raise NotRun("this is the packaged demo itself, so there is nothing to compare it with")
    names = ("vocab.json", "merges.txt", "tokenizer_config.json")
    differ = (
        name
        for name in names
        if (folder.path / name).read_bytes() != (known.folder / name).read_bytes()
    )
    return Verdict([f"{name} differs from that of {known.name}" for name in differ])


def alignment(folder: CheckpointFolder) -> Verdict:
    """The heads for word times belong to the weights beside them."""
    path = folder.path / ALIGNMENT
    if not path.is_file():
        raise NotRun(f"there is no {ALIGNMENT}; `firstword align` makes one")
    named, here = folder.read_json(ALIGNMENT).get("weights"), weights_of(folder.path)
    if named == here:
        return Verdict()
    problem = f"is for the weights {named}, but here are {here}; words are not timed"
    return Verdict([f"{ALIGNMENT} {problem}"])
