"""What steps with and without drafts were really worth, at each load.

A cost surface predicts the steps it was measured on; while every step drafts, it sees none that
does not. So both kinds are timed as they happen, and where the engine drafts it now and then leaves
a draft out, to know what that would be like.
"""

from collections import deque
from dataclasses import dataclass, field
from math import log2
from statistics import fmean, median

PLAIN_STEPS = 8  # the last ones of each load are remembered
DRAFTED_STEPS = 32
FEWEST = 4  # steps of a kind before it is judged: one outlier then cannot decide
FIRST_PLAIN_EVERY = 4  # steps that draft for each that does not, until there are FEWEST
PLAIN_EVERY = 32  # and afterwards: costs a thirtieth of what drafting gains
RETRY_AFTER = 512  # plain steps after which it is forgotten what drafting was worth


class Pace:
    """Measured tokens per second of plain and of drafting steps, by number of requests.

    Neighbouring numbers of requests (within a factor of about 1.4) count as one load.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def record(self, *, drafted: bool, requests: int, tokens: int, seconds: float) -> None:
        """A step that committed `tokens` for `requests` > 0 requests in `seconds` > 0."""
        load = self._at(requests)
        if drafted:
            load.drafted.append((tokens, seconds))
            load.since_plain += 1
            load.since_drafted = 0
        else:
            load.plain.append((tokens, seconds))
            load.since_plain = 0
            load.since_drafted += 1
            if load.since_drafted == RETRY_AFTER:
                load.drafted.clear()

    def gain(self, requests: int) -> float | None:
        """Throughput of drafting over plain steps at this load, less 1; None: not enough seen."""
        load = self._at(requests)
        if min(len(load.drafted), len(load.plain)) < FEWEST:
            return None
        return _throughput(load.drafted) / _throughput(load.plain) - 1.0

    def plain_due(self, requests: int) -> bool:
        """Whether a step that could draft should go without, to be measured."""
        load = self._at(requests)
        few = len(load.plain) < FEWEST
        return load.since_plain >= (FIRST_PLAIN_EVERY if few else PLAIN_EVERY)

    def _at(self, requests: int) -> "_Load":
        return self._loads.setdefault(round(2 * log2(max(requests, 1))), _Load())


@dataclass(slots=True)
class _Load:
    plain: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=PLAIN_STEPS))
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=DRAFTED_STEPS))
    since_plain: int = 0
    since_drafted: int = 0


def _throughput(steps: deque[tuple[int, float]]) -> float:
    """The median time, because a step that something held up says nothing about its kind."""
    return fmean(tokens for tokens, _ in steps) / median(seconds for _, seconds in steps)
