"""What steps with and without drafts were really worth, at each load.

A cost surface predicts the steps it was measured on; while every step drafts, it sees none that
does not. So both kinds are timed as they happen, and where the engine drafts it now and then leaves
a draft out, to know what that would be like.

A step says little: how many tokens it commits is luck, and machines are noisy. So the gain comes
with its standard error, and who decides by it can ask for more than luck would do.
"""

from collections import deque
from dataclasses import dataclass, field
from math import log2

import numpy as np

MEMORY = 512  # steps at a load after which one of them is forgotten
FEWEST_PLAIN = 4  # steps of a kind before it is judged: one outlier then cannot decide
FEWEST_DRAFTED = 16
FIRST_PLAIN_EVERY = 4  # steps that draft for each that does not, until there are enough
PLAIN_EVERY = 32  # and afterwards: costs a thirtieth of what drafting gains
SURE, SURE_PLAIN_EVERY = 3.0, 96  # while the gain is so many standard errors above zero
RECKON_EVERY = 8  # steps for which a gain stands; working it out takes some 0.2 ms


@dataclass(frozen=True, slots=True)
class Gain:
    """Throughput of drafting over plain steps, less 1, and the standard error of that."""

    mean: float
    error: float


class Pace:
    """Measured tokens per second of plain and of drafting steps, by number of requests.

    Neighbouring numbers of requests (within a factor of about 1.4) count as one load.
    """

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def record(self, *, drafted: bool, requests: int, tokens: int, seconds: float) -> None:
        """A step that committed `tokens` for `requests` > 0 requests in `seconds` > 0."""
        self._at(requests).record(drafted, tokens, seconds)

    def gain(self, requests: int) -> Gain | None:
        """At this load; None: not enough seen."""
        load = self._at(requests)
        if load.gain is None or load.now >= load.reckoned + RECKON_EVERY:
            load.gain, load.reckoned = load.reckon(), load.now
        return load.gain

    def plain_due(self, requests: int) -> bool:
        """Whether a step that could draft should go without, to be measured."""
        load = self._at(requests)
        return load.since_plain >= load.plain_every

    def _at(self, requests: int) -> "_Load":
        return self._loads.setdefault(round(2 * log2(max(requests, 1))), _Load())


@dataclass(slots=True)
class _Kind:
    """Steps of one kind: when each was, its tokens and its seconds."""

    steps: deque[tuple[int, float, float]] = field(default_factory=deque)

    def throughput(self) -> tuple[float, float]:
        """Tokens per second, and the relative standard error of that.

        The median time, because a step that something held up says nothing about its kind.
        """
        _, tokens, seconds = np.array(self.steps).T
        time, spread = np.median(seconds), np.subtract(*np.percentile(seconds, (75, 25))) / 1.35
        # Standard errors of a mean, and of the median of nearly normal values.
        errors = tokens.std() / tokens.mean(), 1.25 * spread / time
        relative = float(np.hypot(*errors)) / len(self.steps) ** 0.5
        return float(tokens.mean() / time), relative

    def forget(self, before: int) -> None:
        while self.steps and self.steps[0][0] < before:
            self.steps.popleft()


@dataclass(slots=True)
class _Load:
    plain: _Kind = field(default_factory=_Kind)
    drafted: _Kind = field(default_factory=_Kind)
    since_plain: int = 0
    now: int = 0  # steps seen at this load
    gain: Gain | None = None
    reckoned: int = 0  # when `gain` was

    @property
    def plain_every(self) -> int:
        if len(self.plain.steps) < FEWEST_PLAIN:
            return FIRST_PLAIN_EVERY
        sure = self.gain is not None and self.gain.mean > SURE * self.gain.error
        return SURE_PLAIN_EVERY if sure else PLAIN_EVERY

    def record(self, drafted: bool, tokens: float, seconds: float) -> None:
        self.now += 1
        self.since_plain = self.since_plain + 1 if drafted else 0
        (self.drafted if drafted else self.plain).steps.append((self.now, tokens, seconds))
        for kind in (self.plain, self.drafted):
            kind.forget(self.now - MEMORY)

    def reckon(self) -> Gain | None:
        if len(self.drafted.steps) < FEWEST_DRAFTED or len(self.plain.steps) < FEWEST_PLAIN:
            return None
        (drafted, drafted_error), (plain, plain_error) = (
            kind.throughput() for kind in (self.drafted, self.plain)
        )
        ratio = drafted / plain
        return Gain(ratio - 1.0, ratio * float(np.hypot(drafted_error, plain_error)))
