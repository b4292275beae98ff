"""Policies that do not weigh what tokens cost: what the adaptive planners are measured against."""

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.errors import ConfigError
from dspark.core.planner.interface import Lengths, Outlook, StepLoad
from dspark.core.planner.ranking import admit, token_values
from dspark.core.survival import CurrentScores, HistoricalScores


class _Baseline:
    """Verifies what it drafts, as far as the step has room for it."""

    def outlook(self, scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Outlook:
        return Outlook(load.capacity)


class NonePlanner(_Baseline):
    """Plain decoding: nothing is drafted, nothing is verified."""

    name = "none"

    def draft_length(self, block_size: int) -> int:
        return 0

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        return np.zeros(load.requests, np.int64)


class FixedPlanner(_Baseline):
    """Always the first `length` draft tokens; if the step is too full for that, fewer for all."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ConfigError(f"A fixed plan needs a length of at least 1, got {length}.")
        self.length = length
        self.name = f"fixed:{length}"

    def draft_length(self, block_size: int) -> int:
        return min(self.length, block_size)

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        alike = np.arange(self.length)[:, None] < np.minimum(load.caps, self.length)
        return admit(alike.astype(np.float64), load.capacity)


class ThresholdPlanner(_Baseline):
    """Tokens whose survival is at least `threshold`; of these the likeliest if the step is too full
    for all."""

    def __init__(self, threshold: float) -> None:
        if not 0.0 < threshold <= 1.0:
            raise ConfigError(f"A survival threshold lies above 0 and up to 1, got {threshold:g}.")
        self.threshold = threshold
        self.name = f"threshold:{threshold:g}"

    def draft_length(self, block_size: int) -> int:
        return block_size

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        values = token_values(scores, load)
        values[np.less(scores.survival.T, self.threshold)] = 0.0
        return admit(values, load.capacity)
