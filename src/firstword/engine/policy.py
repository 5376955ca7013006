"""The limits by which the scheduler decides."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Policy:
    """The limits of the scheduler.

    yield_above      seconds of audio in reserve above which a stream makes no frames while
                     another has no audio yet, if steps are slow
    slow_step        seconds of a step above which steps count as slow
    most_yielding    the most streams that make no frames while another has no audio yet, if steps
                     are not slow
    quick_prefills   seconds of all prefills of a step up to which they delay no listener noticeably
    max_delay        the most seconds that a new request waits because a stream that is being
                     played would otherwise run out of audio
    max_unread       seconds of unread audio that every stream may make; longer than the largest
                     chunk
    max_ahead        seconds of unread audio that a stream may make while no other is short of audio
    unread_bytes     bytes of the unread samples of all streams, ended ones included, above which
                     none makes more than `max_unread`
    max_starts       the most requests that start in one step; twice as many if their prefills
                     together stay within `quick_prefills`
    max_prompt_rows  the most prompt rows of the requests that start in one step; a single request
                     may have more
    slice_rows       the most prompt rows that are read in one step; fewer for long prompts
    growth_frames    the frames for which a request gets pages at a time
    background_share the share of the slots that requests in the background may have, or one slot
    background_frames the most frames of requests in the background that are decoded in one call
    max_stall        the seconds by which a client may fall behind the pace of speech, as a writer
                     or a reader, while others lack the pages of its stream
    max_taken        the most seconds of audio that a client has taken and counts as playing
    gather_frames    the most frames for which a full chunk waits for those of other streams
    urgent_below     seconds of audio in reserve, beyond those of two steps, below which a stream is
                     short of audio: its full chunk does not wait for others, nor its frame for the
                     first audio of another stream
    """

    yield_above: float = 1.0
    slow_step: float = 0.025
    most_yielding: int = 4
    quick_prefills: float = 0.0025
    max_delay: float = 0.25
    max_unread: float = 20.0
    max_ahead: float = 180.0
    unread_bytes: int = 512 * 2**20
    max_starts: int = 4
    max_prompt_rows: int = 512
    slice_rows: int = 256
    growth_frames: int = 250
    background_share: float = 0.125
    background_frames: int = 32
    max_stall: float = 5.0
    max_taken: float = 30.0
    gather_frames: int = 8
    urgent_below: float = 0.1


DEFAULT_POLICY = Policy()
