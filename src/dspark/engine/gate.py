"""Whether a step drafts at all, decided before anything is drafted and from history alone.

A draft that is then not verified still costs its time. Where speculation does not pay (a busy
batch, a drafter that is seldom right) the gate parks it, and looks again every so often. Because it
sees only earlier steps and committed state, it cannot bias the output.
"""

from dataclasses import dataclass, replace

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.planner import Planner, StepLoad, plain_throughput
from dspark.core.survival import HistoricalScores
from dspark.engine.events import GateState, GateStatus
from dspark.engine.history import History
from dspark.engine.pace import Gain, Pace

MIN_BLOCKS = 16  # observations before the first judgement
PROBE_EVERY = 16  # parked steps for each one that drafts: with a 15 % draft, about 1 % of the time
PROBE_ROWS = 4  # rows that draft in such a step: a busy batch needs no more to be judged
RESUME_GAIN = 0.03  # parks below 0 and resumes above this, so that noise does not make it flap
DOUBT = 2.0  # standard errors below 0 that a measured gain must be to park

NOTHING_KNOWN = HistoricalScores(np.zeros((0, 0)))


@dataclass(frozen=True, slots=True)
class Allowance:
    """What a step may do, fixed before it drafts."""

    rows: int  # most rows that draft
    capacity: int  # most draft tokens that are verified, over all rows


class DraftGate:
    """Hysteresis around the gain of drafting at the current load: the measured one, or the one that
    the planner expects where too little was measured.
    """

    def __init__(self, planner: Planner, cost: StepCost | None) -> None:
        self._planner = planner
        self._cost = cost
        self._parked_steps = 0
        self._pace = Pace()
        self._trims = False  # the last plan
        self._drafter = True
        self.status = GateStatus(GateState.OFF, "no drafter attached")

    @property
    def likely_to_draft(self) -> bool:
        """Whether the next step drafts unless something changes."""
        return self.status.state.pays or self.status.state is GateState.WARMING_UP

    def open(self, *, drafter: bool = True) -> None:
        """There is something to draft with: judge from now on. `drafter`: and not prompt lookup
        alone."""
        self._drafter = drafter
        self._parked_steps = 0
        self._pace = Pace()
        if missing := self._missing:
            self.status = GateStatus(GateState.NO_DATA, f"{missing}, so nothing is drafted")
        else:
            self.status = GateStatus(GateState.WARMING_UP, "nothing observed yet")

    def use_cost(self, cost: StepCost) -> None:
        """Judge by another cost surface from now on."""
        self._cost = cost
        if self.status.state is GateState.NO_DATA or (not self._closed and self._missing):
            self.open(drafter=self._drafter)

    def close(self, reason: str, state: GateState = GateState.OFF) -> None:
        """Nothing is drafted until `open` is called."""
        self.status = GateStatus(state, reason)

    def planned(self, *, trimmed: bool) -> None:
        """The drafts of a step were planned, and some of their tokens left out, or none."""
        self._trims = trimmed
        if self.status.state.pays:
            self.status = replace(self.status, state=self._drafting)

    def decide(self, history: History, load: StepLoad) -> Allowance:
        """For a step with this load, whose `caps` are what its rows could draft."""
        if self._closed or self._cost is None or self._missing:
            return Allowance(0, 0)
        known = history.scores() if len(history) >= MIN_BLOCKS else NOTHING_KNOWN
        outlook = self._planner.outlook(known, load, self._cost)
        if outlook.expect is not None:
            gain, basis = self._pace.gain(load.requests), "measured"
            if gain is None:
                expected = outlook.expect() / plain_throughput(load, self._cost) - 1.0
                gain, basis = Gain(expected, error=0.0), "expected"
            self.status = self._judge(gain, f"{basis} for {load.requests} requests")
            # Beside a prefill a plain step would teach nothing: such steps are not timed.
            if self.status.state.pays and load.decodes and self._pace.plain_due(load.requests):
                return Allowance(0, 0)
        elif len(history) < MIN_BLOCKS:
            observed = f"{len(history)} of {MIN_BLOCKS} blocks observed"
            self.status = GateStatus(GateState.WARMING_UP, observed)
        else:
            self.status = GateStatus(self._drafting, f"{self._planner.name} always drafts")
        if self.status.state is GateState.PARKED:
            return Allowance(0, 0)
        if self.status.state is GateState.PROBING:  # history says 0; what it is worth now is asked
            return Allowance(PROBE_ROWS, min(PROBE_ROWS, load.capacity))
        return Allowance(load.requests, outlook.capacity)

    def took(self, *, drafted: bool, requests: int, tokens: int, seconds: float) -> None:
        """A step of decoding rows only is over: it committed `tokens` in `seconds`. Its drafts came
        from every row that could draft, or from none."""
        if self.status.state is not GateState.PROBING or requests == 1:  # else it drafts less
            self._pace.record(drafted=drafted, requests=requests, tokens=tokens, seconds=seconds)

    @property
    def _closed(self) -> bool:
        return self.status.state in (GateState.OFF, GateState.PROFILING)

    @property
    def _missing(self) -> str:
        if self._cost is None:
            return "no cost profile"
        return self._cost.missing(drafter=self._drafter)

    @property
    def _drafting(self) -> GateState:
        return GateState.TRIMMING if self._trims else GateState.VERIFY_ALL

    def _judge(self, gain: Gain, basis: str) -> GateStatus:
        parked = self.status.state in (GateState.PARKED, GateState.PROBING)
        reason = f"{gain.mean:+.1%} {basis}"
        if gain.mean >= (RESUME_GAIN if parked else -DOUBT * gain.error):
            self._parked_steps = 0
            return GateStatus(self._drafting, reason, gain.mean)
        self._parked_steps += 1
        state = GateState.PARKED if self._parked_steps % (PROBE_EVERY + 1) else GateState.PROBING
        return GateStatus(state, reason, gain.mean)
