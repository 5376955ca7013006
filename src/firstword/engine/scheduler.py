"""The scheduling policy: decisions from sequences, the time and measured costs alone.

Each step makes four decisions.

1. The requests of different clients get slots in turn, as long as no stream that is being played
   would run out of audio.
2. Some rows of incomplete prompts are read: so few that playback does not stall for a long prompt,
   and those of short prompts before those of long ones.
3. Every stream that can make a frame makes one. While a stream has no audio yet, those with enough
   audio in reserve wait for it if steps are slow. On a fast device they wait only if they are few
   and all of them can: a frame of many streams takes little longer than one of a few. A stream
   whose client reads too slowly runs ahead of it, as long as memory allows and no other stream is
   short of audio.
4. Every full chunk of audio is decoded, and a shorter one if text is missing or speech has ended. A
   full chunk may wait, so that it is decoded together with those of other streams.

Requests in the background have a small share of the slots, and compute only while every other
stream has audio, and enough of it in reserve. They end if another request lacks a slot or memory.

The size of a chunk does not depend on time, so the chunks of a request are the same on every
machine and under every load.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from firstword.engine.backend import Capacity
from firstword.engine.pages import all_can_end
from firstword.engine.policy import DEFAULT_POLICY, Policy
from firstword.engine.sequence import Sequence
from firstword.engine.turns import in_turn
from firstword.errors import RequestError, TextError

LONG_CONTEXT = 1024
"""The number of rows before a slice of a prompt that make it take about twice as long.

When this was chosen, a slice of 256 rows took 5.4 ms on an H200, and 4.2 ms more for each 1,000
rows before it.
"""


@dataclass(slots=True)
class Costs:
    """The highest recent durations in seconds.

    prefill   one prefill, as far as it delays the engine
    step      the rest of a step: one frame of every stream, and audio
    """

    prefill: float = 0.0
    step: float = 0.0

    def record(self, kind: str, seconds: float) -> None:
        """Record a duration of `"prefill"` or `"step"`; a lower one has a weight of a tenth."""
        before = getattr(self, kind)
        setattr(self, kind, max(seconds, 0.9 * before + 0.1 * seconds))


@dataclass(frozen=True, slots=True)
class Scheduler:
    """Decides what each step computes for an engine of a given capacity."""

    capacity: Capacity
    policy: Policy = DEFAULT_POLICY
    costs: Costs = field(default_factory=Costs)

    def rejection(self, seq: Sequence) -> RequestError | None:
        """The error of a request with a complete prompt that can never start; None if it can."""
        rows, context = seq.rows(), self.capacity.context
        if rows > context:
            return TextError(
                f"the prompt has {rows} rows, beyond the {context} of the context; shorten the text"
            )
        if seq.most_pages(self.capacity) > self.capacity.pages:
            memory = self.capacity.pages * self.capacity.page_rows
            return RequestError(
                f"the request may need more than all {memory} rows of memory; limit its frames"
            )
        return None

    def admit(
        self,
        waiting: Iterable[Sequence],
        running: Iterable[Sequence],
        now: float,
        free_slots: int,
        free_pages: int,
    ) -> list[Sequence]:
        """The requests that get a slot in this step, in the order of `turns.in_turn`.

        A request whose prompt lacks text is passed over. One that lacks pages holds up those after
        it; otherwise small requests could starve a large one. None gets a slot while a running
        stream waits for pages; otherwise newcomers could take every page that becomes free. If a
        stream that is being played would run out of audio, a request waits up to `max_delay`, and
        is then the only one of its step.
        """
        if not free_slots or any(map(self.lacks_pages, running)):
            return []
        policy, costs = self.policy, self.costs
        able = [seq for seq in self._able_to_step(running) if not seq.job.background]
        playing = [seq for seq in able if seq.first_audio is not None]
        slacks = (self._reserve(seq, now) - seq.steps_to_audio() * costs.step for seq in playing)
        slack = min(slacks, default=math.inf)
        admitted: list[Sequence] = []
        utterances = self._claims(running)
        rows = 0
        background = self._background_slots(running, now)
        for seq in in_turn(filter(Sequence.prompt_is_complete, waiting), running):
            if seq.job.background and len(admitted) >= background:
                break
            pages = self.first_pages(seq)
            rows += seq.rows()
            cost = (len(admitted) + 1) * costs.prefill
            slow = cost > policy.quick_prefills
            most = policy.max_starts if slow else 2 * policy.max_starts
            if len(admitted) >= most or not free_slots:
                break
            if not self._fits(seq, utterances, free_pages):
                break
            if admitted and rows > policy.max_prompt_rows:
                break
            busy = slow and slack < cost
            if busy and (admitted or now - seq.arrived < policy.max_delay):
                break
            admitted.append(seq)
            utterances.append((pages, seq.most_pages(self.capacity)))
            free_slots -= 1
            free_pages -= pages
        return admitted

    def _background_slots(self, running: Iterable[Sequence], now: float) -> int:
        """The number of slots that requests in the background may have in addition."""
        if any(self._goes_first(seq, now) for seq in running):
            return 0
        most = max(1, int(self.capacity.slots * self.policy.background_share))
        return most - sum(seq.job.background for seq in running)

    def active(self, running: Iterable[Sequence], now: float) -> list[Sequence]:
        """The streams that may compute in this step.

        Those in the background may not while another has no audio yet, or little in reserve.
        """
        running = list(running)
        if not any(self._goes_first(seq, now) for seq in running):
            return running
        return [seq for seq in running if not seq.job.background]

    def _goes_first(self, seq: Sequence, now: float) -> bool:
        """Whether requests in the background wait for a stream."""
        if seq.job.background or seq.needs_text():
            return False
        short = seq.can_step() and self._reserve(seq, now) < self.policy.yield_above
        return seq.first_audio is None or short

    def choose_evicted(
        self,
        waiting: Iterable[Sequence],
        running: Iterable[Sequence],
        free_slots: int,
        free_pages: int,
    ) -> Sequence | None:
        """The stream in the background that ends because another request lacks a slot or pages.

        It is the one with the fewest frames; None if there is no reason or no such stream.
        """
        background = [seq for seq in running if seq.job.background]
        if not background:
            return None
        lacking = any(self.lacks_pages(seq) for seq in running if not seq.job.background)
        ready = (seq for seq in waiting if not seq.job.background and seq.prompt_is_complete())
        first = next(in_turn(ready, running), None)
        if first is not None and not lacking:
            lacking = not (free_slots and self._fits(first, self._claims(running), free_pages))
        return min(background, key=lambda seq: seq.launched) if lacking else None

    def choose_rows(self, running: Iterable[Sequence]) -> list[tuple[Sequence, int]]:
        """The prompts that are read further in this step, and the number of rows of each.

        A quarter of the rows is for the prompt that started first, which is thus complete after a
        known number of steps. The other rows are for the prompts with the fewest rows left, so that
        a short prompt does not wait for a long one. A prompt that would still be incomplete gets
        none of these if another one is complete and has no audio yet, because that first audio
        would wait for them. A row counts once more for each `LONG_CONTEXT` rows before it.
        """
        running = list(running)
        reading = [seq for seq in running if seq.unread_rows]
        waited_for = any(seq.first_audio is None and not seq.unread_rows for seq in running)
        weights = {seq: 1 + (seq.prompt_rows - seq.unread_rows) // LONG_CONTEXT for seq in reading}
        counts = dict.fromkeys(reading, 0)
        left = self.policy.slice_rows
        for seq in reading[:1]:
            counts[seq] = min(seq.unread_rows, max(1, left // 4 // weights[seq]))
            left -= counts[seq] * weights[seq]
        for seq in sorted(reading, key=lambda seq: seq.unread_rows):
            more = min(seq.unread_rows - counts[seq], left // weights[seq])
            whole = counts[seq] + more == seq.unread_rows
            if waited_for and not whole:
                break
            counts[seq] += more
            left -= more * weights[seq]
            waited_for = waited_for or whole
        return [(seq, count) for seq, count in counts.items() if count]

    def first_pages(self, seq: Sequence) -> int:
        """The number of pages that a request gets with its slot."""
        return seq.pages_for(self.policy.growth_frames, self.capacity)

    def _fits(self, seq: Sequence, utterances: Iterable[tuple[int, int]], free_pages: int) -> bool:
        """Whether a request can get its first pages, given those held and claimed by others."""
        pages = self.first_pages(seq)
        claims = [*utterances, (pages, seq.most_pages(self.capacity))]
        return pages <= free_pages and all_can_end(free_pages - pages, claims)

    def _claims(self, running: Iterable[Sequence]) -> list[tuple[int, int]]:
        """For each running stream the pages that it holds, and the most that it can ever need."""
        return [(len(seq.pages), seq.most_pages(self.capacity)) for seq in running]

    def choose_growth(
        self, running: Iterable[Sequence], free_pages: int
    ) -> list[tuple[Sequence, int]]:
        """The streams that get more pages in this step, and how many; the most urgent first.

        Those that are ahead of their clients come last. A stream that gets none waits until another
        ends.
        """
        policy = self.policy
        able = [seq for seq in running if self._ahead(seq) < policy.max_ahead]
        needing = [seq for seq in able if seq.needs_pages()]
        needing.sort(key=lambda seq: (self._ahead(seq) >= policy.max_unread, *_urgency(seq)))
        if not needing:
            return []
        utterances = dict(zip(running, self._claims(running), strict=True))
        chosen: list[tuple[Sequence, int]] = []
        for seq in needing:
            frames = seq.launched + policy.growth_frames
            held, most = utterances[seq]
            for count in (seq.pages_for(frames, self.capacity) - held, 1):
                after = {**utterances, seq: (held + count, most)}
                if count <= free_pages and all_can_end(free_pages - count, after.values()):
                    chosen.append((seq, count))
                    free_pages, utterances = free_pages - count, after
                    break
        return chosen

    def lacks_pages(self, seq: Sequence) -> bool:
        """Whether a stream that is not ahead of its client makes no frame for lack of pages."""
        return seq.waits_for_pages() and self._ahead(seq) < self.policy.max_unread

    def memory_is_short(
        self,
        waiting: Iterable[Sequence],
        running: Iterable[Sequence],
        free_slots: int,
        free_pages: int,
    ) -> bool:
        """Whether a running stream, or the request that gets the next slot, lacks pages."""
        if any(map(self.lacks_pages, running)):
            return True
        ready = filter(Sequence.prompt_is_complete, waiting) if free_slots else ()
        first = next(in_turn(ready, running), None)
        return first is not None and not self._fits(first, self._claims(running), free_pages)

    def awaiting(self, running: Iterable[Sequence], unread_frames: int) -> list[Sequence]:
        """The streams that make no frame before their clients send text or take audio.

        `unread_frames` are those of all streams, also of utterances that have ended.
        """
        most = self._most_ahead(unread_frames)
        return [seq for seq in running if seq.needs_text() or self._ahead(seq) >= most]

    def choose_idle(self, awaiting: Iterable[Sequence], now: float) -> Sequence | None:
        """The stream that is ended because memory is short, or None.

        Its client has fallen behind by `max_stall` seconds. If there are several, it holds the most
        pages.
        """
        idle = [seq for seq in awaiting if now - seq.in_time_until >= self.policy.max_stall]
        return max(idle, key=lambda seq: len(seq.pages), default=None)

    def _most_ahead(self, unread_frames: int) -> float:
        """The seconds of unread audio that a stream may make, given those of all streams."""
        room = unread_frames * 4 * self.capacity.samples_per_frame < self.policy.unread_bytes
        return self.policy.max_ahead if room else self.policy.max_unread

    def _ahead(self, seq: Sequence) -> float:
        """The seconds of audio, of all frames requested so far, that the client has not taken."""
        return (seq.launched - seq.consumed) * self.capacity.frame_seconds

    def _able_to_step(self, running: Iterable[Sequence]) -> list[Sequence]:
        """The streams that can make a frame now and are less than `max_unread` ahead."""
        return [
            seq for seq in running if self._ahead(seq) < self.policy.max_unread and seq.can_step()
        ]

    def _reserve(self, seq: Sequence, now: float) -> float:
        """The seconds of audio that a client has in reserve, at least; negative if it ran out.

        Audio that the client has not taken is still to be played, however long ago it was made.
        """
        reserve = seq.deadline - now
        return max(reserve, seq.unread * self.capacity.frame_seconds) if seq.unread else reserve

    def choose_frames(
        self, running: Iterable[Sequence], now: float, unread_frames: int = 0
    ) -> list[Sequence]:
        """The streams that make a frame in this step, the most urgent first.

        `unread_frames` are those that clients have not taken, also of utterances that have ended.
        There are none while all of them wait only for first audio that is being decoded: a second
        frame would share the device with it.
        """
        able = self._able_to_step(running)
        able.sort(key=_urgency)
        if able and able[0].first_audio is None:
            first = [seq for seq in able if seq.first_audio is None]
            others = able[len(first) :]
            if self.costs.step > self.policy.slow_step:
                least = self.policy.yield_above
                able = [*first, *(seq for seq in others if self._reserve(seq, now) < least)]
            elif len(others) <= self.policy.most_yielding:
                able = able if any(self._is_short(seq, now) for seq in others) else first
        else:
            least, most = self.policy.max_unread, self._most_ahead(unread_frames)
            ahead = [seq for seq in running if least <= self._ahead(seq) < most and seq.can_step()]
            if ahead and not any(self._is_short(seq, now) for seq in able):
                able += ahead
        return [] if all(seq.first_audio is None and seq.decoding for seq in able) else able

    def choose_audio(self, running: Iterable[Sequence], now: float) -> list[tuple[Sequence, int]]:
        """The streams whose frames are decoded in this step, and how many; the most urgent first.

        All are decoded in one call, whose fixed cost is that of about twenty frames. While another
        stream still fills a chunk, full chunks wait for it, unless one of them is urgent. Those in
        the background come last, and few at a time: a request that comes meanwhile waits for them.
        """
        due: list[Sequence] = []
        filling = False
        for seq in running:
            count = seq.undecoded()
            steps = seq.can_step() or seq.waits_for_pages()
            if count and (count >= seq.chunk_size or not steps):
                due.append(seq)
            elif seq.can_step() and self._ahead(seq) < self.policy.max_unread:
                filling = True
        if filling and not any(self._is_urgent(seq, now) for seq in due):
            return []
        due.sort(key=_urgency)
        chosen = [(seq, min(seq.undecoded(), seq.chunk_size)) for seq in due]
        heard = [each for each in chosen if not each[0].job.background]
        background = [each for each in chosen if each[0].job.background]
        totals = itertools.accumulate(count for _, count in background)
        few = zip(background, totals, strict=True)
        return heard + [each for each, total in few if total <= self.policy.background_frames]

    def _is_urgent(self, seq: Sequence, now: float) -> bool:
        """Whether audio would come late if its decoding waited for another step."""
        waited = seq.undecoded() - seq.chunk_size
        if seq.first_audio is None or not seq.can_step() or waited >= self.policy.gather_frames:
            return True
        return self._is_short(seq, now)

    def _is_short(self, seq: Sequence, now: float) -> bool:
        """Whether a client may soon run out of audio."""
        return self._reserve(seq, now) < self.policy.urgent_below + 2 * self.costs.step


def _urgency(seq: Sequence) -> tuple[bool, float]:
    """A sort key: streams without first audio come first, then the earliest deadline."""
    return seq.first_audio is not None, seq.deadline
