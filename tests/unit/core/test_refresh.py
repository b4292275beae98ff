"""The surface follows the steps that are served: from a wrong start, through outliers and noise."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CapacityPlanner, StepLoad
from dspark.core.refresh import BATCH, CostRefresher, StepTime
from dspark.core.survival import CurrentScores, DeterminedScores
from dspark.core.types import VerificationMode

COST = StepCost(
    tokens=Curve((1, 2, 4, 8, 16, 32, 64, 128), (0.04, 0.041, 0.05, 0.06, 0.08, 0.12, 0.2, 0.4)),
    draft=Curve((1, 4, 16, 32), (0.005, 0.008, 0.015, 0.03)),
    head_row_seconds=2e-4,
    context_token_seconds=5e-6,
    overhead_seconds=0.001,
)
SIZES = np.arange(1, 129)


def step(true: StepCost, batch: int, *, context: int = 500, factor: float = 1.0) -> StepTime:
    """A decoding step: every row needs logits, and four rows are a request that drafts."""
    rows = max(batch // 4, 1)
    seconds = float(true.verify_seconds(batch, batch, context)) * factor
    drafting = true.draft_seconds(rows) * factor
    return StepTime(batch, batch, context, seconds, rows, drafting, true.overhead_seconds * factor)


def fed(
    refresher: CostRefresher,
    true: StepCost,
    *,
    steps: int,
    noise: float = 0.0,
    sizes: tuple[int, ...] = (1, 3, 6, 12, 24, 48, 96, 128),
    seed: int = 0,
) -> StepCost:
    """The surface after so many steps of these sizes and contexts of up to 8k tokens."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        factor = float(np.exp(rng.normal(0.0, noise)))
        context = int(rng.integers(8192))
        refresher.observe(step(true, int(rng.choice(sizes)), context=context, factor=factor))
    return refresher.cost


def error(cost: StepCost, true: StepCost, context: int = 2000) -> float:
    """Largest relative error of a step's seconds over all batch sizes."""
    expected = true.verify_seconds(SIZES, SIZES, context)
    return float(np.abs(cost.verify_seconds(SIZES, SIZES, context) / expected - 1).max())


def scaled(cost: StepCost, factor: float) -> StepCost:
    def curve(of: Curve) -> Curve:
        return replace(of, seconds=tuple(factor * second for second in of.seconds))

    assert cost.draft is not None
    return StepCost(
        tokens=curve(cost.tokens),
        draft=curve(cost.draft),
        head_row_seconds=factor * cost.head_row_seconds,
        context_token_seconds=factor * cost.context_token_seconds,
        overhead_seconds=factor * cost.overhead_seconds,
    )


def test_a_surface_comes_with_every_batch_of_steps() -> None:
    refresher = CostRefresher(COST)
    new = [refresher.observe(step(COST, 8)) for _ in range(2 * BATCH)]
    assert [cost is not None for cost in new] == ([False] * (BATCH - 1) + [True]) * 2
    assert refresher.cost is new[-1]


def test_a_true_surface_stays() -> None:
    assert error(fed(CostRefresher(COST), COST, steps=50 * BATCH), COST) < 1e-9


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_converges_from_a_wrong_start(noise: float) -> None:
    """Another size, another shape, no draw of the head or of contexts."""
    wrong = StepCost(
        tokens=Curve(COST.tokens.counts, (0.02, 0.02, 0.02, 0.02, 0.02, 0.15, 0.3, 0.3)),
        draft=Curve((1, 4, 16, 32), (0.02, 0.02, 0.02, 0.02)),
        overhead_seconds=0.01,
    )
    assert error(wrong, COST) > 0.7
    refresher = CostRefresher(wrong)
    cost = fed(refresher, COST, steps=3000, noise=noise)
    assert error(cost, COST) < 0.15
    assert cost.draft is not None
    for rows in (1, 3, 6, 12, 24, 32):
        assert cost.draft_seconds(rows) == pytest.approx(COST.draft_seconds(rows), rel=0.12)
    assert cost.overhead_seconds == pytest.approx(COST.overhead_seconds, rel=0.1)


def test_a_slower_machine_is_followed_everywhere() -> None:
    slower = scaled(COST, 2.0)
    refresher = CostRefresher(COST)
    assert error(fed(refresher, slower, steps=12 * BATCH, noise=0.05), slower) < 0.05
    assert error(fed(refresher, COST, steps=12 * BATCH, noise=0.05), COST) < 0.05


def test_sizes_that_are_not_served_move_with_those_that_are() -> None:
    cost = fed(CostRefresher(COST), scaled(COST, 2.0), steps=20 * BATCH, sizes=(4,))
    ratio = cost.verify_seconds(SIZES, SIZES, 500) / COST.verify_seconds(SIZES, SIZES, 500)
    assert ratio[3] == pytest.approx(2.0, rel=0.02)
    assert np.all(ratio > 1.4)
    beyond = cost.verify_seconds(1000, 1000, 500) / COST.verify_seconds(1000, 1000, 500)
    assert 1.4 < float(beyond) < 2.3


def test_slopes_keep_their_ratio_until_steps_tell_them_apart() -> None:
    slower = scaled(COST, 1.5)
    alike = CostRefresher(COST)
    for _ in range(20 * BATCH):
        alike.observe(step(slower, 8, context=0))  # context costs nothing here
    assert alike.cost.context_token_seconds > 1.3 * COST.context_token_seconds
    dearer = replace(COST, context_token_seconds=4 * COST.context_token_seconds)
    cost = fed(CostRefresher(COST), dearer, steps=100 * BATCH)
    assert cost.context_token_seconds == pytest.approx(dearer.context_token_seconds, rel=0.15)


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_a_burst_of_outliers_moves_it_little(factor: float) -> None:
    refresher = CostRefresher(COST)
    for index in range(BATCH):
        refresher.observe(step(COST, 8, factor=factor if index < BATCH // 2 - 1 else 1.0))
    assert error(refresher.cost, COST) < 0.09


@pytest.mark.parametrize("factor", [1e-3, 30.0])
def test_a_batch_of_outliers_moves_it_by_at_most_three_quarters(factor: float) -> None:
    refresher = CostRefresher(COST)
    for _ in range(BATCH):
        refresher.observe(step(COST, 8, factor=factor))
    assert error(refresher.cost, COST) < 0.75
    assert error(fed(refresher, COST, steps=30 * BATCH), COST) < 0.1


def test_a_tiered_curve_keeps_its_tiers() -> None:
    tiers = replace(COST, tokens=replace(COST.tokens, tiered=True))
    slow_tier = list(COST.tokens.seconds)
    slow_tier[5:] = [1.5 * second for second in slow_tier[5:]]
    true = replace(tiers, tokens=replace(tiers.tokens, seconds=tuple(slow_tier)))
    cost = fed(CostRefresher(tiers), true, steps=60 * BATCH, sizes=COST.tokens.counts)
    assert cost.tokens.tiered
    assert float(cost.tokens(17)) == float(cost.tokens(32))
    assert error(cost, true) < 0.05


def test_a_step_beyond_the_grid_is_learned_from() -> None:
    cost = fed(CostRefresher(COST), scaled(COST, 1.5), steps=20 * BATCH, sizes=(300,))
    expected = 1.5 * COST.verify_seconds(300, 300, 500)
    assert float(cost.verify_seconds(300, 300, 500)) == pytest.approx(float(expected), rel=0.05)


def test_what_does_not_draft_never_gets_a_draft_cost() -> None:
    cost = fed(CostRefresher(replace(COST, draft=None)), COST, steps=BATCH)
    assert cost.draft is None
    refresher = CostRefresher(COST)
    for _ in range(BATCH):
        refresher.observe(replace(step(COST, 8), draft_rows=0, draft_seconds=9.0))
    assert refresher.cost.draft == COST.draft


def test_a_flat_surface_gets_a_shape() -> None:
    flat = replace(COST, tokens=Curve((1, 128), (0.1, 0.1)), head_row_seconds=0.0)
    assert flat.missing(drafter=True)
    assert not fed(CostRefresher(flat), COST, steps=BATCH).missing(drafter=True)


def test_longer_contexts_change_plans_without_a_new_profile() -> None:
    """Beside a dear context a further row is cheap; the profile did not know that it was dear."""
    profile = replace(COST, context_token_seconds=0.0)
    true = replace(COST, context_token_seconds=3e-5)
    refresher = CostRefresher(profile)
    caps, weights = np.full(8, 7), np.ones(8)
    survival = np.tile(0.6 ** np.arange(1, 8), (8, 1))
    blocks = DeterminedScores.of(CurrentScores(survival), [VerificationMode.GREEDY])

    def verified(context: int) -> int:
        load = StepLoad(8, context, caps, weights, capacity=99, determined=True)
        return int(CapacityPlanner().plan(blocks, load, refresher.cost).sum())

    assert verified(8 * 4096) == verified(8 * 100) > 0
    fed(refresher, true, steps=50 * BATCH)
    assert verified(8 * 4096) > verified(8 * 100) > 0


@given(
    times=st.lists(
        st.tuples(st.integers(1, 400), st.floats(0.0, 1e6), st.integers(0, 10**6)),
        min_size=BATCH,
        max_size=2 * BATCH,
    ),
    tiered=st.booleans(),
)
@settings(max_examples=40)
def test_whatever_is_measured_the_surface_is_valid_and_does_not_fall(
    times: list[tuple[int, float, int]], tiered: bool
) -> None:
    start = replace(COST, tokens=replace(COST.tokens, tiered=tiered))
    one, other = CostRefresher(start), CostRefresher(start)
    for batch, seconds, context in times:
        measured = StepTime(batch, batch, context, seconds, batch, seconds / 3, seconds / 5)
        assert one.observe(measured) == other.observe(measured)
    assert all(a <= b for a, b in pairwise(one.cost.tokens.seconds))
    assert np.all(np.diff(one.cost.verify_seconds(np.arange(1, 600), 1, 0)) >= 0)
    assert np.isfinite(one.cost.verify_seconds(600, 600, 10**6))
