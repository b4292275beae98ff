"""A planner that does what no planner may do in `rejection` mode."""

from dataclasses import replace

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.planner import CapacityPlanner, Lengths, Outlook, StepLoad
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores


class LeakingPlanner:
    """Verifies of each request what would be best if the step were its own, by a search over its
    current scores: whether a token is admitted may hang on the confidences behind it, and so on the
    token itself. It is the search of the paper's counter-example (DSpark, Appendix A).

    For each request alone, because the more requests share one search, the less of it hangs on any
    one token.
    """

    name = "leaking"

    def draft_length(self, block_size: int) -> int:
        return block_size

    def outlook(self, scores: HistoricalScores, load: StepLoad, cost: StepCost) -> Outlook:
        return Outlook(load.capacity)

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        search = CapacityPlanner()
        lengths = np.zeros(load.requests, np.int64)
        for r in np.flatnonzero(load.caps):
            alone = replace(
                load,
                base_tokens=1,
                caps=load.caps[[r]],
                weights=load.weights[[r]],
                capacity=int(load.caps[r]),
                drafter_rows=0,
            )
            passed_off = DeterminedScores(scores.survival[[r]])
            lengths[r] = search.plan(passed_off, alone, cost)[0]
        return lengths
