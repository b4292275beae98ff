"""How many tokens the step verifies is decided by history, which ones by the current scores."""

from dspark.core.cost import StepCost
from dspark.core.planner.interface import Lengths, Outlook, StepLoad
from dspark.core.planner.prospects import Prospects, rehearsal
from dspark.core.planner.ranking import admit, ranked, token_values
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores


class CapacityPlanner:
    """Fixes K, the draft tokens a step verifies, by an unrestricted search over earlier blocks; the
    likeliest K of the current ones are then admitted (DSpark paper, §5.2).

    The search may look at every K, so it crosses the bumps of a jagged cost curve that stop
    `CausalPlanner`; the current scores only rank, so nothing leaks. Where the output of a step is
    determined whatever is verified, nothing can leak, and the current scores are searched instead.
    """

    name = "capacity"

    def draft_length(self, block_size: int) -> int:
        return block_size

    def outlook(self, scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Outlook:
        """Of equally good K the smallest; with nothing known, a token for each drafting request."""
        if len(scores.survival) == 0:
            return Outlook(load.capacity if load.determined else min(load.drafting, load.capacity))
        if load.determined:  # `plan` will search each step anew

            def expect() -> float:
                steps = rehearsal(scores, load, cost)
                return steps.throughput(steps.best())

            return Outlook(load.capacity, expect)
        mean = rehearsal(scores, load, cost).mean()
        best = mean.best()
        return Outlook(int(best[0]), lambda: mean.throughput(best))

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        values = token_values(scores, load)
        if not isinstance(scores, DeterminedScores):
            return admit(values, load.capacity)
        best = ranked(values)[None, : load.capacity]
        step = Prospects.of(best, load, cost)
        return admit(values, int(step.best()[0]))
