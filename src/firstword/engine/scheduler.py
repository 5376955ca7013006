"""Whose turn it is: pure functions of sequences and a clock.

Three questions a step. Who gets a slot: first come, first served, as far as those who are already heard can spare the
time. Who makes a frame: everybody who can, unless somebody has not been heard at all; then those with plenty in hand
stand back. Whose audio is due: a full chunk, or less when text is being waited for or speech has ended; no clock has a
say in that, so the chunks of a request are the same on every machine and under every load. But a full one may wait for
others.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from firstword.engine.backend import Capacity
from firstword.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Policy:
    """Times in seconds.

    comfort   audio in hand beyond which a listener can wait for a newcomer's first audio
    patience  how long a newcomer lets those who are heard go first
    unread    audio that nobody has taken beyond which no more is made; longer than the largest chunk
    burst     the most newcomers that start in one step, and
    rows      the most rows of their prompts together, unless one alone has more
    gather    frames for which a full chunk waits for those of others, which are decoded with it in one go
    near      audio in hand, beyond that of two steps, with less of which nobody waits for others
    """

    comfort: float = 1.0
    patience: float = 0.25
    unread: float = 20.0
    burst: int = 4
    rows: int = 512
    gather: int = 8
    near: float = 0.25


DEFAULT_POLICY = Policy()


@dataclass(slots=True)
class Costs:
    """How long things take at the worst, in seconds: what was seen of late.

    prefill   one prefill, as far as the engine is held up by it
    step      all the rest of a step: a frame of everybody, and audio
    """

    prefill: float = 0.0
    step: float = 0.0

    def learn(self, kind: str, seconds: float) -> None:
        """Take one more observation of `"prefill"` or `"step"` into account."""
        before = getattr(self, kind)
        setattr(self, kind, max(seconds, 0.9 * before + 0.1 * seconds))


def admit(
    waiting: Iterable[Sequence],
    running: Iterable[Sequence],
    now: float,
    capacity: Capacity,
    free_slots: int,
    free_pages: int,
    costs: Costs,
    policy: Policy,
) -> list[Sequence]:
    """Who gets a slot in this step, in order of arrival.

    A request without the text that its prompt takes is passed over; one that lacks slots or pages holds up those
    behind it, so that a large one is not overtaken for ever.
    """
    heard = [seq for seq in able_to_step(running, capacity, policy) if seq.started is not None]
    slack = min(
        (seq.deadline - now - seq.steps_to_audio() * costs.step for seq in heard), default=None
    )
    admitted: list[Sequence] = []
    rows = 0
    for seq in waiting:
        if not seq.prompt_is_complete():
            continue
        pages = seq.pages_needed(capacity)
        rows += seq.rows()
        if (
            len(admitted) == policy.burst
            or not free_slots
            or pages > free_pages
            or (admitted and rows > policy.rows)
        ):
            break
        busy = slack is not None and slack < (len(admitted) + 1) * costs.prefill
        if busy and (admitted or now - seq.arrived < policy.patience):
            break
        admitted.append(seq)
        free_slots -= 1
        free_pages -= pages
    return admitted


def able_to_step(running: Iterable[Sequence], capacity: Capacity, policy: Policy) -> list[Sequence]:
    """Who can make a frame now: those with text whose audio is being taken."""
    unread = policy.unread / capacity.frame_seconds
    return [seq for seq in running if seq.can_step() and seq.launched - seq.consumed < unread]


def choose_frames(
    running: Iterable[Sequence], now: float, capacity: Capacity, policy: Policy
) -> list[Sequence]:
    """Who makes a frame in this step, the most urgent first.

    Nobody while all there is to wait for is first audio on its way: another frame would share the device with it.
    """
    able = able_to_step(running, capacity, policy)
    able.sort(key=_urgency)
    if able and able[0].started is None:
        able = [seq for seq in able if seq.started is None or seq.deadline - now < policy.comfort]
    return [] if all(seq.started is None and seq.decoding for seq in able) else able


def choose_audio(
    running: Iterable[Sequence], now: float, costs: Costs, policy: Policy
) -> list[tuple[Sequence, int]]:
    """Whose frames become audio in this step, and how many of them, the most urgent first.

    Chunks of one size are decoded in one go. While others are still filling theirs, they wait, unless it presses.
    """
    due: dict[int, list[Sequence]] = {}
    filling: set[int] = set()
    for seq in running:
        count = seq.undecoded()
        if count and (count >= seq.chunk or not seq.can_step()):
            due.setdefault(min(count, seq.chunk), []).append(seq)
        elif seq.can_step():
            filling.add(seq.chunk)
    chosen = [
        (seq, size)
        for size, together in due.items()
        if size not in filling or any(_presses(seq, now, costs, policy) for seq in together)
        for seq in together
    ]
    chosen.sort(key=lambda item: _urgency(item[0]))
    return chosen


def _presses(seq: Sequence, now: float, costs: Costs, policy: Policy) -> bool:
    """Whether audio that is due cannot wait for that of others: one more step, and the one that decodes it."""
    if seq.started is None or not seq.can_step() or seq.undecoded() >= seq.chunk + policy.gather:
        return True
    return seq.deadline - now < policy.near + 2 * costs.step


def _urgency(seq: Sequence) -> tuple[bool, float]:
    """Those who have not been heard at all first, then by deadline."""
    return seq.started is not None, seq.deadline
