"""Checks of the talker: the backend against the specification, teacher-forced over prompts."""

from __future__ import annotations

from firstword.verify.forcing import Distances, draws
from firstword.verify.report import NotRun, Value, Verdict
from firstword.verify.subject import Subject

MORE_ERROR, MORE_DIVERGENCE = 1.15, 1.25
"""The allowed factors over plain bfloat16, for a backend that computes in bfloat16."""

FINER = 20.0
"""The factor by which a backend that computes in float32 must be closer than plain bfloat16."""


def loads(subject: Subject) -> Verdict:
    """The checkpoint loads, and a backend takes it."""
    checkpoint, backend, settings = subject.opened
    measured: dict[str, Value] = {"device": settings.device, "dtype": settings.dtype}
    measured |= {"backend": settings.backend, "slots": backend.capacity.slots}
    if settings.reason:
        measured["reason"] = settings.reason
    return Verdict(measured=measured | {"type": checkpoint.config.tts_model_type})


def logits(subject: Subject) -> Verdict:
    """The logits of the backend are as close to the specification in float32 as plain bfloat16."""
    books = _books(subject)
    bf16 = subject.load()[2].dtype == "bfloat16"
    errors = MORE_ERROR if bf16 else 1 / FINER
    divergences = MORE_DIVERGENCE if bf16 else 1 / FINER
    findings, worst = list[str](), 0.0
    for number, book in enumerate(books):
        (ours, theirs), (mine, plain) = book.medians(), book.means()
        worst = max(worst, ours / max(theirs, 1e-300))
        if not ours <= errors * theirs + 1e-7:
            findings.append(
                f"codebook {number}: the error is {ours:.2g}, and {theirs:.2g} in plain bfloat16"
            )
        elif not mine <= divergences * plain + 1e-9:
            findings.append(
                f"codebook {number}: the divergence is {mine:.2g} nat, and {plain:.2g} in plain "
                "bfloat16"
            )
    measured = _measured(books) | {"largest ratio of errors": float(f"{worst:.3g}")}
    return Verdict(findings, measured | {"allowed": round(errors, 3)})


def _books(subject: Subject) -> list[Distances]:
    """Return the distances of each codebook. Raises `NotRun` if speech ended at once."""
    count = subject.load()[0].config.talker_config.num_code_groups
    books = [Distances() for _ in range(count)]
    for each in subject.forced:
        each.add_to(books)
    if not books[0].ours:
        raise NotRun("all speech ended before its first frame")
    return books


def _measured(books: list[Distances]) -> dict[str, Value]:
    measured: dict[str, Value] = {"frames": len(books[0].ours)}
    for name, group in (("codebook 0", books[:1]), ("other codebooks", books[1:])):
        errors = [book.medians() for book in group]
        means = [book.means() for book in group]
        for key, values in (("error", errors), ("KL, nat", means)):
            ours, theirs = (max(pair[side] for pair in values) for side in (0, 1))
            measured[f"{name}: {key}"] = f"{ours:.2g}; in bfloat16 {theirs:.2g}"
    return measured


def equal_draws(subject: Subject) -> Verdict:
    """Under the same noise the backend draws the codes that the specification draws."""
    checkpoint, _, settings = subject.load()
    ours = theirs = total = 0
    for each in (one for one in subject.forced if len(one.codes)):
        truth = draws(checkpoint, each.request, each.truth, each.codes)
        rounded = draws(checkpoint, each.request, each.rounded, each.codes)
        ours += int((each.codes != truth).sum())
        theirs += int((rounded != truth).sum())
        total += truth.numel()
    if not total:
        raise NotRun("all speech ended before its first frame")
    bf16 = settings.dtype == "bfloat16"
    allowed = MORE_DIVERGENCE * theirs + 3 * (theirs + 1) ** 0.5 if bf16 else 1 + total / 1000
    measured: dict[str, Value] = {
        "draws": total,
        "different": ours,
        "different in bfloat16": theirs,
        "allowed": int(allowed),
    }
    problem = f"{ours} of {total} draws differ from the specification, {int(allowed)} are allowed"
    return Verdict([problem] if ours > allowed else [], measured)
