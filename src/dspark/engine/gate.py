"""Whether a step drafts at all, decided before anything is drafted and from history alone.

A draft that is then not verified still costs its time. Where speculation does not pay (a busy
batch, a drafter that is seldom right) the gate parks it, and looks again every so often. Because it
sees only earlier steps and committed state, it cannot bias the output.
"""

from dspark.core.cost import StepCost
from dspark.core.planner import Planner, StepLoad, expected_gain
from dspark.engine.events import GateState, GateStatus
from dspark.engine.history import History

MIN_BLOCKS = 16  # observations before the first judgement
PROBE_EVERY = 16  # parked steps for each one that drafts: with a 15 % draft, about 1 % of the time
PROBE_ROWS = 4  # rows that draft in such a step: a busy batch needs no more to be judged
RESUME_GAIN = 0.03  # parks below 0 and resumes above this, so that noise does not make it flap


class DraftGate:
    """Hysteresis around the gain that `expected_gain` predicts for a step of the current load."""

    def __init__(self, planner: Planner, cost: StepCost | None) -> None:
        self._planner = planner
        self._cost = cost
        self._parked_steps = 0
        self.status = GateStatus(GateState.OFF, "no drafter attached")

    @property
    def likely_to_draft(self) -> bool:
        """Whether the next step drafts unless something changes."""
        return self.status.state in (GateState.WARMING_UP, GateState.DRAFTING)

    def open(self) -> None:
        """There is a drafter: judge from now on."""
        self._parked_steps = 0
        if self._cost is None:
            self.status = GateStatus(GateState.NO_DATA, "no cost profile, so nothing is drafted")
        elif not self._planner.adaptive:
            self.status = GateStatus(GateState.DRAFTING, f"{self._planner.name} always drafts")
        else:
            self.status = GateStatus(GateState.WARMING_UP, "nothing observed yet")

    def close(self, reason: str) -> None:
        """There is nothing to decide until `open` is called."""
        self.status = GateStatus(GateState.OFF, reason)

    def decide(self, history: History, load: StepLoad) -> int:
        """Most rows of a step with this load that draft; `load.caps` are what they could draft."""
        if self._cost is not None and self._planner.adaptive:
            self.status = self._judge(history, load, self._cost)
        if self.status.state is GateState.PROBING:
            return PROBE_ROWS
        return load.requests if self.likely_to_draft else 0

    def _judge(self, history: History, load: StepLoad, cost: StepCost) -> GateStatus:
        if len(history) < MIN_BLOCKS:
            return GateStatus(
                GateState.WARMING_UP, f"{len(history)} of {MIN_BLOCKS} blocks observed"
            )
        without, with_draft = expected_gain(history.scores(), load, cost)
        gain = with_draft / without - 1.0
        parked = self.status.state in (GateState.PARKED, GateState.PROBING)
        if gain >= (RESUME_GAIN if parked else 0.0):
            self._parked_steps = 0
            return GateStatus(GateState.DRAFTING, f"{gain:+.1%} expected", gain)
        self._parked_steps += 1
        state = GateState.PARKED if self._parked_steps % (PROBE_EVERY + 1) else GateState.PROBING
        return GateStatus(state, f"{gain:+.1%} expected for {load.requests} requests", gain)
