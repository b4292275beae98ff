"""The walk that stops at the first decline."""

from dspark.core.cost import StepCost
from dspark.core.planner.interface import Lengths, Outlook, StepLoad
from dspark.core.planner.prospects import Prospects, rehearsal
from dspark.core.planner.ranking import admit, ranked, token_values
from dspark.core.survival import CurrentScores, HistoricalScores


class CausalPlanner:
    """Admits the likeliest tokens while expected tokens per second strictly rise, and stops at the
    first decline (Algorithm 1 of the DSpark paper, over the cost of the whole step).

    Stopping there, although a better plan may lie further on, is what makes it lossless: whether a
    token is admitted depends on scores at least as high as its own, never on what follows it.
    """

    name = "causal"

    def draft_length(self, block_size: int) -> int:
        return block_size

    def outlook(self, scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Outlook:
        """Where the walk stops at a bump of the cost curve, no gain is expected behind it."""
        if len(scores.survival) == 0:
            return Outlook(load.capacity)

        def expect() -> float:
            steps = rehearsal(scores, load, cost)
            return steps.throughput(steps.first_decline())

        return Outlook(load.capacity, expect)

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        values = token_values(scores, load)
        best = ranked(values)[None, : load.capacity]
        step = Prospects.of(best, load, cost)
        return admit(values, int(step.first_decline()[0]))
