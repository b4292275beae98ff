from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import ArrayLike

from dspark.core.cost import Curve, StepCost
from dspark.core.errors import ConfigError
from dspark.core.planner import (
    CapacityPlanner,
    CausalPlanner,
    FixedPlanner,
    NonePlanner,
    Outlook,
    Planner,
    StepLoad,
    ThresholdPlanner,
    parse_planner,
    plain_throughput,
)
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores

FLAT = StepCost(tokens=Curve((1, 100), (1.0, 1.0)))
LINEAR = StepCost(tokens=Curve((0, 100), (0.0, 100.0)))  # a token costs one second


def load(requests: int, **changes: object) -> StepLoad:
    """One anchor a request, room for everything, blocks of up to three."""
    caps = np.full(requests, 3, np.int64)
    return replace(StepLoad(requests, 0, caps, np.ones(requests), capacity=1000), **changes)


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
        assert plan(FixedPlanner(2), survival, FLAT, capacity=4) == [2, 1, 1]

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
            planned = plan(CausalPlanner(), survival, FLAT, capacity=room)
            assert planned == np.bincount(admitted, minlength=40).tolist()

    def test_the_likeliest_fill_a_short_step(self) -> None:
        survival = [[0.9, 0.8, 0.1], [0.7, 0.6, 0.5]]
        assert plan(CausalPlanner(), survival, FLAT, capacity=3) == [2, 1]

    def test_caps_hold(self) -> None:
        caps = np.array([1, 2])
        assert plan(CausalPlanner(), [[0.9, 0.8, 0.7]] * 2, FLAT, caps=caps) == [1, 2]

    def test_no_room_is_no_draft(self) -> None:
        assert plan(CausalPlanner(), [[0.9, 0.8, 0.7]], FLAT, capacity=0) == [0]

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
        assert plan(CausalPlanner(), [[0.3, 0, 0]], cost, drafter_rows=0) == [0]
        assert plan(CausalPlanner(), [[0.3, 0, 0]], cost) == [1]

    def test_the_head_is_paid_by_the_row(self) -> None:
        cost = StepCost(tokens=Curve((1, 100), (1.0, 1.0)), head_row_seconds=10.0)
        assert plan(CausalPlanner(), [[0.9, 0.9, 0.9]], cost) == [0]

    def test_context_counts(self) -> None:
        cost = replace(LINEAR, context_token_seconds=0.01)
        assert plan(CausalPlanner(), [[0.5, 0, 0]], cost) == [0]
        assert plan(CausalPlanner(), [[0.5, 0, 0]], cost, context_tokens=1000) == [1]

    def test_scores_of_another_batch_are_refused(self) -> None:
        with pytest.raises(ValueError, match="a plan for 2 requests got scores of 1"):
            CausalPlanner().plan(CurrentScores([[0.5, 0, 0]]), load(2), FLAT)


class TestThreshold:
    def test_admits_what_survives_well_enough(self) -> None:
        survival = [[0.9, 0.6, 0.1], [0.59, 0.5, 0.4]]
        assert plan(ThresholdPlanner(0.6), survival, LINEAR) == [2, 0]
        assert ThresholdPlanner(0.6).draft_length(7) == 7

    def test_keeps_to_caps_and_capacity(self) -> None:
        survival = [[0.9, 0.8, 0.7], [0.95, 0.75, 0.65]]
        assert plan(ThresholdPlanner(0.6), survival, FLAT, caps=np.array([1, 3])) == [1, 3]
        assert plan(ThresholdPlanner(0.6), survival, FLAT, capacity=3) == [2, 1]

    @pytest.mark.parametrize("threshold", [0.0, -0.5, 1.01, float("nan")])
    def test_impossible_thresholds_are_refused(self, threshold: float) -> None:
        with pytest.raises(ConfigError, match="above 0 and up to 1"):
            ThresholdPlanner(threshold)


class TestCapacity:
    # Cheap up to two rows, then dear, then flat: the causal walk stops at the jump.
    jagged = StepCost(tokens=Curve((1, 2, 3, 4, 5), (1.0, 1.2, 1.9, 1.9, 9.0)))
    history = HistoricalScores([[0.9, 0.8, 0.7]] * 4)

    def test_drafts_whole_blocks(self) -> None:
        assert CapacityPlanner().draft_length(7) == 7

    def test_capacity_lies_beyond_a_bump_that_stops_the_causal_walk(self) -> None:
        assert CapacityPlanner().outlook(self.history, load(1), self.jagged).capacity == 3
        assert plan(CausalPlanner(), [[0.9, 0.8, 0.7]], self.jagged) == [1]

    def test_current_scores_only_rank(self) -> None:
        """Hopeless or certain, two tokens are two tokens: those worth most."""
        for survival in ([[0.9, 0.8, 0.1], [0.7, 0.0, 0.0]], [[0.02, 0.01, 0], [1e-3, 1e-4, 0]]):
            assert plan(CapacityPlanner(), survival, LINEAR, capacity=2) == [2, 0]

    def test_equal_scores_go_by_position_then_request(self) -> None:
        survival = np.random.default_rng(1).choice([0.25, 0.5, 0.75], size=(40, 3))
        survival = -np.sort(-survival, axis=1)
        ranked = sorted((-survival[r, k], k, r) for r in range(40) for k in range(3))
        for capacity in range(121):
            admitted = [request for _, _, request in ranked[:capacity]]
            planned = plan(CapacityPlanner(), survival, FLAT, capacity=capacity)
            assert planned == np.bincount(admitted, minlength=40).tolist()

    def test_with_nothing_known_a_token_for_each_drafting_request(self) -> None:
        unknown = HistoricalScores(np.zeros((0, 3)))
        step = load(4, caps=np.array([3, 0, 1, 2]))
        outlook = CapacityPlanner().outlook(unknown, step, FLAT)
        assert (outlook.capacity, outlook.throughput) == (3, None)
        assert CapacityPlanner().outlook(unknown, replace(step, capacity=2), FLAT).capacity == 2

    def test_a_determined_step_is_searched_whatever_history_says(self) -> None:
        hopeless, step = HistoricalScores([[0.0, 0.0, 0.0]]), load(1, determined=True)
        assert CapacityPlanner().outlook(hopeless, step, self.jagged).capacity == step.capacity
        scores = DeterminedScores([[0.9, 0.8, 0.7]])
        assert CapacityPlanner().plan(scores, step, self.jagged).tolist() == [3]
        assert CapacityPlanner().plan(scores, replace(step, capacity=2), self.jagged) == [1]

    def test_searching_each_step_is_expected_to_bring_more_than_one_capacity_for_all(self) -> None:
        spread = HistoricalScores([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]] * 8)
        cost = StepCost(tokens=Curve((0, 100), (1.0, 51.0)))
        fixed, searched = (
            CapacityPlanner().outlook(spread, load(1, determined=determined), cost).throughput
            for determined in (False, True)
        )
        assert searched > 1.05 * fixed


class TestWeights:
    """A token of weight 2 counts like two tokens."""

    cost = StepCost(tokens=Curve((0, 100), (1.0, 61.0)))

    @pytest.mark.parametrize("planner", [CausalPlanner(), CapacityPlanner()])
    def test_the_heavy_request_comes_first(self, planner: Planner) -> None:
        weights, survival = np.array([1.0, 2.0]), [[0.9, 0.8, 0.7], [0.5, 0.42, 0.3]]
        planned = plan(planner, survival, FLAT, weights=weights, capacity=3)
        assert planned == [1, 2]  # 1.0 > 0.9 > 0.84 > 0.8

    def test_only_the_ratio_of_weights_matters(self) -> None:
        survival = [[0.9, 0.8, 0.1], [0.7, 0.2, 0.1]]
        for history in (HistoricalScores(survival), HistoricalScores(np.ones((2, 3)))):
            light, heavy = (
                CapacityPlanner().outlook(history, load(2, weights=np.full(2, weight)), self.cost)
                for weight in (1.0, 8.0)
            )
            assert light.capacity == heavy.capacity
        assert plan(CausalPlanner(), survival, self.cost) == plan(
            CausalPlanner(), survival, self.cost, weights=np.full(2, 8.0)
        )


def throughput(planner: Planner, scores: HistoricalScores, step: StepLoad, cost: StepCost) -> float:
    value = planner.outlook(scores, step, cost).throughput
    assert value is not None
    return value


@pytest.mark.parametrize("planner", [CausalPlanner(), CapacityPlanner()], ids=lambda p: p.name)
class TestExpectedThroughput:
    history = HistoricalScores([[0.8, 0.6, 0.4]])

    def test_is_that_of_the_plan_to_expect(self, planner: Planner) -> None:
        cost = replace(FLAT, draft=Curve((1, 2), (0.5, 0.5)))
        assert plain_throughput(load(1), cost) == pytest.approx(1.0)
        assert throughput(planner, self.history, load(1), cost) == pytest.approx(2.8 / 1.5)

    def test_a_useless_draft_is_a_loss(self, planner: Planner) -> None:
        cost = replace(LINEAR, draft=Curve((1, 2), (1.0, 1.0)))
        useless = HistoricalScores([[0.1, 0, 0]])
        assert throughput(planner, useless, load(1), cost) < plain_throughput(load(1), cost)

    def test_only_what_a_drafter_is_asked_for_is_paid(self, planner: Planner) -> None:
        cost = replace(FLAT, draft=Curve((1, 2), (0.5, 0.5)))
        paid, free = (
            throughput(planner, self.history, load(1, drafter_rows=rows), cost) for rows in (1, 0)
        )
        assert paid == throughput(planner, self.history, load(1), cost)
        assert free == throughput(planner, self.history, load(1), FLAT) > paid

    def test_a_sample_stands_for_the_requests_however_large_it_is(self, planner: Planner) -> None:
        once = [[0.9, 0.8, 0.1], [0.3, 0.1, 0.0]]
        cost = StepCost(tokens=Curve((0, 100), (1.0, 3.0)))
        for requests in (1, 2, 7):
            small, large = (
                throughput(planner, HistoricalScores(once * n), load(requests), cost)
                for n in (1, 32)
            )
            assert small == pytest.approx(large, rel=0.1)

    def test_only_rows_that_may_draft_gain(self, planner: Planner) -> None:
        gains = [
            throughput(planner, self.history, load(2, caps=np.array(caps)), FLAT)
            for caps in ([3, 3], [3, 0], [1, 2], [0, 0])
        ]
        assert gains == pytest.approx([2 + 2 * 1.8, 2 + 1.8, 2 + 0.8 + 1.4, 2])

    def test_a_full_step_gains_nothing(self, planner: Planner) -> None:
        full = load(1, capacity=0)
        assert throughput(planner, self.history, full, FLAT) == plain_throughput(full, FLAT)

    def test_spread_is_worth_more_than_its_mean(self, planner: Planner) -> None:
        cost = replace(LINEAR, overhead_seconds=2.0)
        spread, mean = (
            throughput(planner, HistoricalScores(sample), load(2), cost)
            for sample in ([[1, 1, 1], [0, 0, 0]], [[0.5, 0.5, 0.5]] * 2)
        )
        assert spread > 1.2 * mean


def test_there_is_no_gain_behind_a_bump_that_the_causal_walk_stops_at() -> None:
    cost = StepCost(tokens=Curve((1, 2, 3, 4), (1.0, 2.0, 2.0, 2.0)))
    history = TestExpectedThroughput.history
    assert throughput(CausalPlanner(), history, load(1), cost) == 1.0
    assert throughput(CapacityPlanner(), history, load(1), cost) == pytest.approx(2.8 / 2)


def test_without_history_there_is_no_judgement() -> None:
    for planner in (NonePlanner(), FixedPlanner(2), ThresholdPlanner(0.5), CausalPlanner()):
        outlook = planner.outlook(HistoricalScores(np.zeros((0, 3))), load(2), FLAT)
        assert outlook == Outlook(load(2).capacity, None)


def test_a_load_needs_a_cap_and_a_weight_for_each_request() -> None:
    with pytest.raises(ValueError, match="one cap and one weight"):
        load(2, weights=np.ones(3))


@pytest.mark.parametrize(
    "text", ["none", "causal", "capacity", "fixed:1", "fixed:12", "threshold:0.6", "threshold:1"]
)
def test_a_planner_is_named_as_it_is_selected(text: str) -> None:
    assert parse_planner(text).name == text


@pytest.mark.parametrize(
    "text",
    [
        "", "greedy", "Causal", "causal ", "causal:1", "fixed", "fixed:", "fixed:0", "fixed:-1",
        "fixed:1.5", "fixed:1:2", "fixed:\u0663", "threshold", "threshold:0", "threshold:1.1",
        "threshold:nan", "threshold:-0.1", "threshold:x",
    ],
)  # fmt: skip
def test_other_names_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_planner(text)
