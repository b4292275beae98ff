"""What holds for every plan, whatever the scores, the load and the cost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import (
    CapacityPlanner,
    CausalPlanner,
    FixedPlanner,
    NonePlanner,
    Planner,
    StepLoad,
    ThresholdPlanner,
)
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores

CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 0.9, 1.0])  # few values: many ties
WEIGHTS = st.sampled_from([1.0, 1.0, 1.0, 0.5, 2.0])


@st.composite
def scores(draw: st.DrawFn, requests: int, block_size: int) -> CurrentScores:
    rows = [draw(st.lists(CONFIDENCES, min_size=0, max_size=block_size)) for _ in range(requests)]
    return CurrentScores.from_confidences(rows, block_size)


@st.composite
def costs(draw: st.DrawFn, *, convex: bool = False) -> StepCost:
    steps = draw(st.lists(st.floats(0, 0.5), min_size=3, max_size=12))
    seconds = 1.0 + np.cumsum(sorted(steps) if convex else steps)
    return StepCost(
        tokens=Curve(
            tuple(range(1, len(steps) + 1)),
            tuple(seconds.tolist()),
            tiered=not convex and draw(st.booleans()),
        ),
        draft=Curve((1, 8), (0.0, draw(st.floats(0, 1)))),
        head_row_seconds=draw(st.sampled_from([0.0, 0.05])),
        context_token_seconds=1e-4,
        overhead_seconds=draw(st.sampled_from([0.0, 0.1])),
    )


@st.composite
def loads(draw: st.DrawFn, requests: int, block_size: int) -> StepLoad:
    base = requests + draw(st.integers(0, 8))
    caps = draw(st.lists(st.integers(0, block_size), min_size=requests, max_size=requests))
    return StepLoad(
        base_tokens=base,
        context_tokens=draw(st.integers(0, 1000)),
        caps=np.array(caps, np.int64),
        weights=np.array(draw(st.lists(WEIGHTS, min_size=requests, max_size=requests))),
        capacity=draw(st.integers(0, requests * block_size)),
        drafter_rows=draw(st.none() | st.integers(0, requests)),
    )


@st.composite
def situations(draw: st.DrawFn, *, max_requests: int = 5, max_block: int = 4, convex: bool = False):
    requests = draw(st.integers(1, max_requests))
    block_size = draw(st.integers(1, max_block))
    return (
        draw(scores(requests, block_size)),
        draw(loads(requests, block_size)),
        draw(costs(convex=convex)),
    )


Situation = tuple[CurrentScores, StepLoad, StepCost]


PLANNERS = [
    NonePlanner(),
    FixedPlanner(2),
    ThresholdPlanner(0.5),
    CausalPlanner(),
    CapacityPlanner(),
]


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@given(situation=situations())
def test_a_plan_keeps_to_its_limits(planner: Planner, situation: Situation) -> None:
    current, load, cost = situation
    lengths = planner.plan(current, load, cost)
    assert lengths.shape == (load.requests,)
    assert lengths.dtype == np.int64
    assert np.all((lengths >= 0) & (lengths <= load.caps))
    assert lengths.sum() <= load.capacity


@pytest.mark.parametrize("planner", PLANNERS[2:], ids=lambda planner: planner.name)
@given(situation=situations())
def test_nothing_hopeless_is_admitted(planner: Planner, situation: Situation) -> None:
    current, load, cost = situation
    lengths = planner.plan(current, load, cost)
    for survival, length in zip(current.survival, lengths, strict=True):
        assert np.all(survival[:length] > 0)


@pytest.mark.parametrize("planner", PLANNERS, ids=lambda planner: planner.name)
@given(situation=situations(), data=st.data())
def test_admission_never_looks_ahead(
    planner: Planner, situation: Situation, data: st.DataObject
) -> None:
    """Other scores behind token k of a request leave the admission of tokens up to k alone."""
    current, load, cost = situation
    request = data.draw(st.integers(0, load.requests - 1))
    k = data.draw(st.integers(0, current.survival.shape[1] - 1))
    survival = current.survival.copy()
    behind = data.draw(
        st.lists(
            CONFIDENCES, min_size=survival.shape[1] - k - 1, max_size=survival.shape[1] - k - 1
        )
    )
    survival[request, k + 1 :] = survival[request, k] * np.cumprod(behind)
    before = planner.plan(current, load, cost)[request]
    after = planner.plan(CurrentScores(survival), load, cost)[request]
    assert min(before, k + 1) == min(after, k + 1)


@given(situation=situations(max_requests=12, max_block=6))
def test_causal_is_the_published_walk(situation: Situation) -> None:
    """The vectorised plan equals the loop it stands for, ties included."""
    current, load, cost = situation
    ranked = in_order(current, load)
    plan = np.zeros(load.requests, np.int64)
    gain, best = 0.0, throughput(0.0, 0, load, cost)
    for admitted, (loss, _, request) in enumerate(ranked[: load.capacity], start=1):
        gain -= loss
        if (following := throughput(gain, admitted, load, cost)) <= best:
            break
        best = following
        plan[request] += 1
    assert CausalPlanner().plan(current, load, cost).tolist() == plan.tolist()


@given(situation=situations(max_requests=3, max_block=3, convex=True))
def test_causal_finds_the_optimum_of_a_unimodal_objective(situation: Situation) -> None:
    """Falling gains over a convex cost have one peak, so the first decline lies behind it."""
    current, load, cost = situation
    best = max(
        outcome(np.array(lengths), current, load, cost)
        for lengths in product(*[range(cap + 1) for cap in load.caps])
        if sum(lengths) <= load.capacity
    )
    planned = outcome(CausalPlanner().plan(current, load, cost), current, load, cost)
    assert planned == pytest.approx(best, rel=1e-9)


@given(situation=situations(max_requests=8))
def test_capacity_is_filled_in_order(situation: Situation) -> None:
    """The K tokens worth most; ties by position, then request."""
    current, load, cost = situation
    admitted = [request for _, _, request in in_order(current, load)[: load.capacity]]
    plan = CapacityPlanner().plan(current, load, cost)
    assert plan.tolist() == np.bincount(admitted, minlength=load.requests).tolist()


@given(situation=situations(), blocks=st.integers(1, 12), data=st.data())
def test_capacity_is_the_best_over_history(
    situation: Situation, blocks: int, data: st.DataObject
) -> None:
    """The search equals trying every K on every step that can be dealt from the sample."""
    current, load, cost = situation
    block_size = current.survival.shape[1]
    sample = HistoricalScores(data.draw(scores(blocks, block_size)).survival)
    steps = dealt(sample, load)
    best_capacity, best = 0, 0.0
    for capacity in range(min(load.capacity, load.drafting * block_size) + 1):
        gain = float(np.mean([sum(step[:capacity]) for step in steps]))
        expected = throughput(gain, capacity, load, cost)
        if expected > best * (1 + 1e-12):
            best_capacity, best = capacity, expected
    outlook = CapacityPlanner().outlook(sample, load, cost)
    assert outlook.throughput == pytest.approx(best, rel=1e-9)
    assert outlook.capacity == best_capacity


@given(situation=situations(max_requests=3, max_block=3))
def test_a_determined_step_gets_the_best_plan_there_is(situation: Situation) -> None:
    current, load, cost = situation
    best = max(
        outcome(np.array(lengths), current, load, cost)
        for lengths in product(*[range(cap + 1) for cap in load.caps])
        if sum(lengths) <= load.capacity
    )
    plan = CapacityPlanner().plan(DeterminedScores(current.survival), load, cost)
    assert outcome(plan, current, load, cost) == pytest.approx(best, rel=1e-9)


def in_order(current: CurrentScores, load: StepLoad) -> list[tuple[float, int, int]]:
    """Every admissible token as (-value, position, request), in order of admission."""
    return sorted(
        (-load.weights[request] * current.survival[request, position], position, request)
        for request, cap in enumerate(load.caps)
        for position in range(min(cap, current.survival.shape[1]))
        if current.survival[request, position] > 0
    )


def dealt(sample: HistoricalScores, load: StepLoad) -> list[list[float]]:
    """Values of the tokens of steps like this one, falling, dealt in turn from a sample."""
    rows = [r for r, cap in enumerate(load.caps) if cap]
    blocks = len(sample.survival)
    steps = max(blocks // max(len(rows), 1), 1)
    return [
        sorted(
            (
                load.weights[r] * value
                for i, r in enumerate(rows)
                for value in sample.survival[(step * len(rows) + i) % blocks][: load.caps[r]]
            ),
            reverse=True,
        )
        for step in range(steps)
    ]


def outcome(
    lengths: NDArray[np.int64], current: CurrentScores, load: StepLoad, cost: StepCost
) -> float:
    """Expected tokens per second of a plan."""
    gain = sum(
        load.weights[r] * current.survival[r, :length].sum() for r, length in enumerate(lengths)
    )
    return throughput(float(gain), int(lengths.sum()), load, cost)


def throughput(gain: float, admitted: int, load: StepLoad, cost: StepCost) -> float:
    """Expected tokens per second with `gain` more of them expected from `admitted` draft tokens."""
    target = cost.overhead_seconds + cost.verify_seconds(
        load.base_tokens + admitted, load.requests + admitted, load.context_tokens
    )
    paid = np.count_nonzero(load.caps) if load.drafter_rows is None else load.drafter_rows
    draft = cost.draft_seconds(int(paid))
    return float((load.weights.sum() + gain) / (target + draft))
