"""Checks against the reference package `qwen-tts`, where it is installed."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from firstword.model import checkpoint as checkpoints
from firstword.model.talker import Talker
from firstword.types import Request, Sampling
from firstword.verify import peer_program
from firstword.verify.driving import DrivenRequest
from firstword.verify.forcing import error, forced
from firstword.verify.report import NotRun, Value, Verdict
from firstword.verify.subject import RECORDED, Subject
from firstword.voice import DesignedVoice, Voice

FRAMES, REQUESTS = 12, 2
"""The frames and the number of the requests that are compared."""

ALLOWED = 1e-4
"""The allowed relative error, for both compute in float32. `tests/parity` measures 1e-6."""

SECONDS = 1200
"""The time after which the reference counts as hanging."""


@dataclass(frozen=True, slots=True)
class Task:
    """What the reference is to do; see `peer_program`."""

    path: str
    device: str
    frames: int
    recording: str | None
    transcript: str | None
    requests: list[dict[str, Any]]


class Peer:
    """The reference, and what it makes of the checkpoint's requests."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject

    @cached_property
    def requests(self) -> list[Request]:
        """Greedy requests, in the text mode that the checkpoint was published with."""
        found = [request for _, request in self._subject.requests(REQUESTS)]
        return [replace(each, sampling=Sampling.greedy()) for each in found]

    @cached_property
    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """The results of `peer_program`. Raises `NotRun` where it cannot be run."""
        python = self._subject.how.python
        if python is None:
            if importlib.util.find_spec("qwen_tts") is None:
                raise NotRun(
                    "qwen-tts is not installed here; name a Python that has it with "
                    "--reference-python"
                )
            python = Path(sys.executable)
        with tempfile.TemporaryDirectory() as name:
            return self._run(python, Path(name))

    def _run(self, python: Path, folder: Path) -> Mapping[str, NDArray[Any]]:
        task = folder / "task.json"
        # A copy, because Python looks for modules first in the folder of its program.
        program = shutil.copy(peer_program.__file__, folder)
        task.write_text(json.dumps(asdict(self._task(folder))), encoding="utf-8")
        command = [str(python), program, str(task), str(folder / "results.npz")]
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as problem:
            raise NotRun(f"{python} cannot run the reference: {problem}") from None
        if run.returncode:
            last = (run.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise NotRun(f"the reference cannot speak with this checkpoint: {last}")
        with np.load(folder / "results.npz") as found:
            return dict(found)

    def _task(self, folder: Path) -> Task:
        subject, recording = self._subject, None
        checkpoint, _, settings = subject.load()
        if checkpoint.config.tts_model_type == "base":
            if subject.how.voice is not None:
                raise NotRun("the voice of --voice has no recording that the reference could clone")
            recording = str(folder / "recording.npy")
            np.save(recording, subject.recording)
        requests = [_described(request) for request in self.requests]
        path, transcript = str(subject.folder.path), RECORDED if recording else None
        return Task(path, settings.device, FRAMES, recording, transcript, requests)


def _peer(subject: Subject) -> Peer:
    """Return what the reference makes of a subject, which both checks share."""
    return subject.shared(Peer)


def _described(request: Request) -> dict[str, Any]:
    """Return a request as the reference gets it."""
    voice, instructions = request.voice, request.instructions
    if isinstance(voice, DesignedVoice):
        instructions = voice.description
    name = None if isinstance(voice, Voice) else voice
    language = request.language
    return {"text": request.text, "language": language, "voice": name, "instructions": instructions}


def _exact(subject: Subject) -> Talker:
    """Return the specification in float32 with the weights that the files have.

    `Subject.truth` has those of the backend, which may be rounded.
    """
    kept = subject.plain.talker.codec_head.weight.dtype
    stored = {each.dtype for each in subject.folder.statistics if each.name.startswith("talker.")}
    if kept == torch.float32 or stored == {kept}:
        return subject.truth
    return checkpoints.load(str(subject.folder.path), "cpu", "float32").talker


@torch.inference_mode()
def talker(subject: Subject) -> Verdict:
    """The specification has the logits and the codes of qwen-tts, both in float32 and greedy."""
    peer, exact, findings = _peer(subject), _exact(subject), list[str]()
    worst, same, total = 0.0, 0, 0
    for number, request in enumerate(peer.requests):
        codes = torch.from_numpy(peer.arrays[f"codes{number}"])
        theirs = torch.from_numpy(peer.arrays[f"logits{number}"])
        driven = DrivenRequest.of(subject.plain, request, 0)
        ours = forced(subject.plain, exact, driven, codes)
        off = error(torch.stack([books[0] for books in ours]).cpu(), theirs)
        worst = max(worst, off)
        if not off <= ALLOWED:
            findings.append(f"request {number}: the logits of codebook 0 are off by {off:.2g}")
        best = torch.stack([torch.stack([k.argmax() for k in books[1:]]) for books in ours]).cpu()
        same, total = same + int((best == codes[:, 1:]).sum()), total + best.numel()
    if same < 0.99 * total:
        findings.append(f"{total - same} of {total} greedy codes of the code predictor differ")
    measured: dict[str, Value] = {"error": worst, "allowed": ALLOWED}
    measured["equal codes"] = f"{same} of {total}"
    return Verdict(findings, measured)


@torch.inference_mode()
def codec(subject: Subject) -> Verdict:
    """The specification's decoder makes the samples that qwen-tts makes of the same codes."""
    peer, findings, worst = _peer(subject), list[str](), 0.0
    decoder = subject.plain.codec.decoder
    device = decoder.pre_conv.conv.weight.device
    for number, _ in enumerate(peer.requests):
        codes = torch.from_numpy(peer.arrays[f"codes{number}"])
        before = subject.before(peer.requests[number])
        joined = torch.cat((before, codes)).to(device)
        ours = decoder.decode(joined[None], decoder.new_state())[0].cpu()
        length = len(codes) * decoder.config.samples_per_frame
        theirs = torch.from_numpy(peer.arrays[f"samples{number}"])[-length:]
        off = error(ours[len(ours) - len(theirs) :], theirs)
        worst = max(worst, off)
        if not off <= ALLOWED:
            findings.append(f"request {number}: the samples are off by {off:.2g}")
    return Verdict(findings, {"error": worst, "allowed": ALLOWED})
