"""The rejection rule commits exactly the target's law; and a biased rule is caught."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CapacityPlanner, CausalPlanner, StepLoad
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores
from tests.support.enumeration import Context, Model, Weights, model_law, output_law

VOCABULARY = 3
CONTEXTS = [(), *[(a,) for a in range(3)], *[(a, b) for a in range(3) for b in range(3)]]


def distributions(total: int) -> st.SearchStrategy[Weights]:
    """Three weights >= 0 that sum to `total`."""
    cuts = st.tuples(st.integers(0, total), st.integers(0, total)).map(sorted)
    return cuts.map(lambda c: (c[0], c[1] - c[0], total - c[1]))


def models(total: int) -> st.SearchStrategy[Model]:
    """A distribution for each context of up to two tokens; longer ones see the last two."""
    tables = st.tuples(*[distributions(total) for _ in CONTEXTS])
    return tables.map(lambda rows: dict(zip(CONTEXTS, rows, strict=True))).map(
        lambda table: lambda context: table[context[-2:]]
    )


@given(target=models(6), drafter=models(6), lengths=st.tuples(*[st.integers(0, 2)] * 3))
@settings(max_examples=15)
def test_the_committed_text_has_the_target_s_law(
    target: Model, drafter: Model, lengths: tuple[int, int, int]
) -> None:
    def plan(draft: Context) -> int:  # may look at x_1 for anything behind it, so not at 0 or 1
        return 0 if lengths[0] == 0 else min(1 + lengths[draft[0]], 2)

    assert output_law(2, target, drafter, plan, block_size=2) == model_law(2, target)


def test_a_bias_of_two_hundredths_is_caught() -> None:
    def target(context: Context) -> Weights:
        return (30, 10, 10)

    def biased(context: Context) -> Weights:
        return (31, 9, 10)

    def drafter(context: Context) -> Weights:
        return (25, 15, 10)

    law = output_law(1, target, drafter, lambda draft: 1, block_size=1, judge=biased)
    assert law[0,] - model_law(1, target)[0,] == Fraction(2, 100)


class TestCounterExample:
    """The DSpark paper's Appendix A: why a plan must not look at what it is about to judge."""

    cost = StepCost(tokens=Curve((1, 2, 3), (1.0, 1 / 0.5, 1 / 0.45)))

    @staticmethod
    def target(context: Context) -> Weights:
        return (7, 3)

    @staticmethod
    def drafter(context: Context) -> Weights:
        return (5, 5)

    @staticmethod
    def survival(draft: Context) -> list[float]:
        """c_1 = 0.8 for both tokens (it is the overlap of p and q); c_2 depends on x_1."""
        return [0.8, 0.8 * (0.9 if draft[0] == 0 else 0.0)]

    load = StepLoad(1, 0, np.array([2]), np.ones(1), capacity=2, drafter_rows=0)

    def causal(self, draft: Context) -> int:
        scores = CurrentScores([self.survival(draft)])
        return int(CausalPlanner().plan(scores, self.load, self.cost)[0])

    def capacity(self, draft: Context) -> int:
        """An earlier block made two tokens the best; that holds whatever is drafted now."""
        earlier = HistoricalScores([self.survival((0, 0))])
        capacity = CapacityPlanner().outlook(earlier, self.load, self.cost).capacity
        assert capacity == 2
        scores = CurrentScores([self.survival(draft)])
        load = replace(self.load, capacity=capacity)
        return int(CapacityPlanner().plan(scores, load, self.cost)[0])

    def search(self, draft: Context) -> int:
        """The search where it is forbidden: the best length for the current scores, wherever it
        lies. The scores have to be passed off as those of a greedy step."""
        scores = DeterminedScores([self.survival(draft)])
        return int(CapacityPlanner().plan(scores, self.load, self.cost)[0])

    @pytest.mark.parametrize(
        ("plan", "law"),
        [
            ("causal", {(0,): Fraction(7, 10), (1,): Fraction(3, 10)}),
            ("capacity", {(0,): Fraction(7, 10), (1,): Fraction(3, 10)}),
            ("search", {(0,): Fraction(17, 20), (1,): Fraction(3, 20)}),
        ],
    )
    def test_law(self, plan: str, law: dict[Context, Fraction]) -> None:
        plan_of = getattr(self, plan)
        assert output_law(1, self.target, self.drafter, plan_of, block_size=2) == law
