from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from dspark.core.cost import Curve, StepCost
from dspark.core.errors import ConfigError
from dspark.core.planner import (
    CausalPlanner,
    FixedPlanner,
    NonePlanner,
    Planner,
    StepLoad,
    expected_gain,
)
from dspark.core.survival import CurrentScores, HistoricalScores

FLAT = StepCost(tokens=Curve((1, 100), (1.0, 1.0)))
LINEAR = StepCost(tokens=Curve((0, 100), (0.0, 100.0)))  # a token costs one second


def load(requests: int, **changes: object) -> StepLoad:
    """One anchor a request, room for everything, blocks of up to three."""
    caps = np.full(requests, 3, np.int64)
    return replace(StepLoad(requests, requests, 0, caps, 1000), **changes)


def plan(planner: Planner, survival: ArrayLike, cost: StepCost, **changes: object):
    scores = CurrentScores(np.asarray(survival))
    return planner.plan(scores, load(len(survival), **changes), cost).tolist()


def test_none_neither_drafts_nor_verifies() -> None:
    assert NonePlanner().draft_length(7) == 0
    assert plan(NonePlanner(), [[1.0, 1.0, 1.0]], FLAT) == [0]


class TestFixed:
    def test_drafts_what_it_verifies(self) -> None:
        assert [FixedPlanner(4).draft_length(block) for block in (7, 3)] == [4, 3]
        assert FixedPlanner(4).name == "fixed:4"

    def test_ignores_scores_and_keeps_to_the_caps(self) -> None:
        caps = np.array([3, 1, 0])
        assert plan(FixedPlanner(2), [[0.1, 0, 0]] * 3, LINEAR, caps=caps) == [2, 1, 0]

    def test_a_full_step_is_shared_by_position(self) -> None:
        survival = [[0.5, 0.5, 0.5]] * 3
        assert plan(FixedPlanner(2), survival, FLAT, max_batch_tokens=7) == [2, 1, 1]

    def test_nothing_is_not_a_length(self) -> None:
        with pytest.raises(ConfigError, match="at least 1"):
            FixedPlanner(0)


class TestCausal:
    def test_drafts_whole_blocks(self) -> None:
        assert CausalPlanner().draft_length(7) == 7

    def test_free_tokens_are_all_admitted(self) -> None:
        assert plan(CausalPlanner(), [[0.9, 0.1, 0.01], [0.5, 0.2, 0.0]], FLAT) == [3, 2]

    def test_a_tie_is_a_decline(self) -> None:
        """At one second a token, a certain token leaves tokens per second where they are."""
        assert plan(CausalPlanner(), [[1.0, 1.0, 1.0]], LINEAR) == [0]

    def test_it_stops_at_the_first_decline(self) -> None:
        """The third token would be free, and the plan with it the best one; it is not reached."""
        cost = StepCost(tokens=Curve((1, 2, 3, 4, 5), (1.0, 1.2, 3.0, 3.0, 9.0)))
        assert plan(CausalPlanner(), [[1.0, 1.0, 1.0]], cost) == [1]

    def test_equal_scores_go_by_position_then_request(self) -> None:
        survival = np.random.default_rng(0).choice([0.25, 0.5, 0.75], size=(40, 3))
        survival = -np.sort(-survival, axis=1)
        ranked = sorted((-survival[r, k], k, r) for r in range(40) for k in range(3))
        for room in range(120):
            admitted = [request for _, _, request in ranked[:room]]
            planned = plan(CausalPlanner(), survival, FLAT, max_batch_tokens=40 + room)
            assert planned == np.bincount(admitted, minlength=40).tolist()

    def test_the_likeliest_fill_a_short_step(self) -> None:
        survival = [[0.9, 0.8, 0.1], [0.7, 0.6, 0.5]]
        assert plan(CausalPlanner(), survival, FLAT, max_batch_tokens=2 + 3) == [2, 1]

    def test_caps_hold(self) -> None:
        caps = np.array([1, 2])
        assert plan(CausalPlanner(), [[0.9, 0.8, 0.7]] * 2, FLAT, caps=caps) == [1, 2]

    def test_no_room_is_no_draft(self) -> None:
        assert plan(CausalPlanner(), [[0.9, 0.8, 0.7]], FLAT, max_batch_tokens=0) == [0]

    def test_a_step_without_committing_rows(self) -> None:
        planned = CausalPlanner().plan(
            CurrentScores(np.zeros((0, 3))), load(0, base_tokens=64), FLAT
        )
        assert planned.tolist() == []

    def test_a_prefill_chunk_makes_a_token_cheaper_by_comparison(self) -> None:
        cost = replace(LINEAR, overhead_seconds=0.0)
        assert plan(CausalPlanner(), [[0.1, 0, 0]], cost) == [0]
        assert plan(CausalPlanner(), [[0.1, 0, 0]], cost, base_tokens=64) == [1]

    def test_only_a_draft_that_was_paid_for_counts(self) -> None:
        """The draft is sunk; the more it took, the more a verified token is worth."""
        cost = replace(LINEAR, draft=Curve((1, 2), (4.0, 4.0)))
        assert plan(CausalPlanner(), [[0.3, 0, 0]], cost, drafted=False) == [0]
        assert plan(CausalPlanner(), [[0.3, 0, 0]], cost, drafted=True) == [1]

    def test_the_head_is_paid_by_the_row(self) -> None:
        cost = StepCost(tokens=Curve((1, 100), (1.0, 1.0)), head_row_seconds=10.0)
        assert plan(CausalPlanner(), [[0.9, 0.9, 0.9]], cost) == [0]

    def test_context_counts(self) -> None:
        cost = replace(LINEAR, context_token_seconds=0.01)
        assert plan(CausalPlanner(), [[0.5, 0, 0]], cost) == [0]
        assert plan(CausalPlanner(), [[0.5, 0, 0]], cost, context_tokens=1000) == [1]

    @pytest.mark.parametrize(("rows", "caps"), [(1, [3, 3]), (2, [3])])
    def test_scores_of_another_batch_are_refused(self, rows: int, caps: list[int]) -> None:
        scores = CurrentScores([[0.5, 0, 0]] * rows)
        with pytest.raises(ValueError, match="a plan for 2 requests"):
            CausalPlanner().plan(scores, load(2, caps=np.array(caps)), FLAT)


class TestExpectedGain:
    history = HistoricalScores([[0.8, 0.6, 0.4]])

    def test_compares_plain_decoding_with_the_plan_to_expect(self) -> None:
        cost = replace(FLAT, draft=Curve((1, 2), (0.5, 0.5)))
        without, best = expected_gain(self.history, load(1), cost)
        assert (without, best) == pytest.approx((1.0, 2.8 / 1.5))

    def test_a_useless_draft_is_a_loss(self) -> None:
        cost = replace(LINEAR, draft=Curve((1, 2), (1.0, 1.0)))
        without, best = expected_gain(HistoricalScores([[0.1, 0, 0]]), load(1), cost)
        assert best < without

    def test_a_sunk_draft_is_none_of_its_business(self) -> None:
        cost = replace(FLAT, draft=Curve((1, 2), (0.5, 0.5)))
        steps = [load(1, drafted=drafted) for drafted in (True, False)]
        assert len({expected_gain(self.history, step, cost) for step in steps}) == 1

    def test_there_is_no_gain_behind_a_bump_that_the_planner_stops_at(self) -> None:
        cost = StepCost(tokens=Curve((1, 2, 3, 4), (1.0, 2.0, 2.0, 2.0)))
        assert expected_gain(self.history, load(1), cost) == (1.0, 1.0)  # not 2.8 / 2

    def test_a_sample_stands_for_the_requests_however_large_it_is(self) -> None:
        once = [[0.9, 0.8, 0.1], [0.3, 0.1, 0.0]]
        cost = StepCost(tokens=Curve((0, 100), (1.0, 3.0)))
        for requests in (1, 2, 7):
            small, large = (
                expected_gain(HistoricalScores(once * n), load(requests), cost)[1] for n in (1, 32)
            )
            assert small == pytest.approx(large, rel=0.1)

    def test_only_rows_that_may_draft_gain(self) -> None:
        gains = [
            expected_gain(self.history, load(2, caps=np.array(caps)), FLAT)[1]
            for caps in ([3, 3], [3, 0], [0, 0])
        ]
        assert gains == pytest.approx([2 + 2 * 1.8, 2 + 1.8, 2])

    def test_a_full_step_gains_nothing(self) -> None:
        without, best = expected_gain(self.history, load(1, max_batch_tokens=1), FLAT)
        assert best == without

    def test_spread_is_worth_more_than_its_mean(self) -> None:
        cost = replace(LINEAR, overhead_seconds=2.0)
        spread = expected_gain(HistoricalScores([[1, 1, 1], [0, 0, 0]]), load(2), cost)[1]
        mean = expected_gain(HistoricalScores([[0.5, 0.5, 0.5]] * 2), load(2), cost)[1]
        assert spread > 1.2 * mean
