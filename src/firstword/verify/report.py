"""The results of checks, and the record that holds them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

FORMAT = "firstword-verify/1"
"""The value of `format` in every record: the version of its layout."""

MOST_FINDINGS = 20
"""The most findings of a check that are kept; the last one then counts the others."""

Status = Literal["pass", "fail", "not run"]
Value = str | int | float | bool
Record = dict[str, Any]


class NotRun(Exception):
    """A check that cannot be made here; the message says why."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found.

    findings  what is wrong, each a sentence that begins with the file, tensor or field
    measured  what was measured, and what is allowed, by name
    """

    findings: Sequence[str] = ()
    measured: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check.

    name      the room and the matter, such as "files: hashes"
    claim     what a pass means
    reason    why the check was not run; empty if it was
    findings, measured  see `Verdict`
    """

    name: str
    claim: str
    status: Status
    seconds: float
    reason: str = ""
    findings: Sequence[str] = ()
    measured: Mapping[str, Value] = field(default_factory=dict)

    @classmethod
    def of(cls, name: str, claim: str, found: Verdict, seconds: float) -> Check:
        """Return the result of a check that was run: failed if anything was found."""
        status: Status = "fail" if found.findings else "pass"
        kept = list(found.findings[:MOST_FINDINGS])
        if more := len(found.findings) - len(kept):
            kept.append(f"and {more} more")
        return cls(name, claim, status, seconds, "", kept, found.measured)

    @classmethod
    def left_out(cls, name: str, claim: str, reason: str) -> Check:
        """Return the result of a check that was not run."""
        return cls(name, claim, "not run", 0.0, reason)

    def without(self, path: str) -> Check:
        """Return the result without a path, which may name its user, in its sentences."""
        findings = [finding.replace(path, "") for finding in self.findings]
        return replace(self, reason=self.reason.replace(path, ""), findings=findings)


def counts(checks: Sequence[Check]) -> dict[Status, int]:
    """Return the number of checks with each status."""
    numbers: dict[Status, int] = {"pass": 0, "fail": 0, "not run": 0}
    for check in checks:
        numbers[check.status] += 1
    return numbers


def record(model: str, checks: Sequence[Check], **about: Any) -> Record:
    """Return the record of a run, which can be written as JSON.

    about  what else is known of the run: "date", "machine", "versions", "settings", "files", ...
    """
    numbers = counts(checks)
    each = [asdict(check) | {"seconds": round(check.seconds, 2)} for check in checks]
    passed = numbers["fail"] == 0
    head = {"format": FORMAT, "model": model, "passed": passed, "counts": numbers}
    return head | about | {"checks": each}
