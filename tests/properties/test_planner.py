"""What holds for every plan, whatever the scores, the load and the cost."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import CausalPlanner, FixedPlanner, NonePlanner, Planner, StepLoad
from dspark.core.survival import CurrentScores

CONFIDENCES = st.sampled_from([0.0, 0.25, 0.5, 0.5, 0.75, 0.9, 1.0])  # few values: many ties


@st.composite
def scores(draw: st.DrawFn, requests: int, block_size: int) -> CurrentScores:
    rows = [draw(st.lists(CONFIDENCES, min_size=0, max_size=block_size)) for _ in range(requests)]
    return CurrentScores.from_confidences(rows, block_size)


@st.composite
def costs(draw: st.DrawFn, *, convex: bool = False) -> StepCost:
    steps = draw(st.lists(st.floats(0, 0.5), min_size=3, max_size=12))
    seconds = 1.0 + np.cumsum(sorted(steps) if convex else steps)
    return StepCost(
        tokens=Curve(tuple(range(1, len(steps) + 1)), tuple(seconds.tolist())),
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
        requests=requests,
        base_tokens=base,
        context_tokens=draw(st.integers(0, 1000)),
        caps=np.array(caps, np.int64),
        max_batch_tokens=base + draw(st.integers(-2, requests * block_size)),
        drafted=draw(st.booleans()),
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


@pytest.mark.parametrize("planner", [NonePlanner(), FixedPlanner(2), CausalPlanner()])
@given(situation=situations())
def test_a_plan_keeps_to_its_limits(planner: Planner, situation: Situation) -> None:
    current, load, cost = situation
    lengths = planner.plan(current, load, cost)
    assert lengths.shape == (load.requests,)
    assert lengths.dtype == np.int64
    assert np.all((lengths >= 0) & (lengths <= load.caps))
    assert lengths.sum() <= room(load)


@given(situation=situations())
def test_nothing_hopeless_is_admitted(situation: Situation) -> None:
    current, load, cost = situation
    lengths = CausalPlanner().plan(current, load, cost)
    for survival, length in zip(current.survival, lengths, strict=True):
        assert np.all(survival[:length] > 0)


@given(situation=situations(), data=st.data())
def test_admission_never_looks_ahead(situation: Situation, data: st.DataObject) -> None:
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
    before = CausalPlanner().plan(current, load, cost)[request]
    after = CausalPlanner().plan(CurrentScores(survival), load, cost)[request]
    assert min(before, k + 1) == min(after, k + 1)


@given(situation=situations(max_requests=12, max_block=6))
def test_causal_is_the_published_walk(situation: Situation) -> None:
    """The vectorised plan equals the loop it stands for, ties included."""
    current, load, cost = situation
    ranked = sorted(
        (-current.survival[request, position], position, request)
        for request, cap in enumerate(load.caps)
        for position in range(min(cap, current.survival.shape[1]))
        if current.survival[request, position] > 0
    )
    plan = np.zeros(load.requests, np.int64)
    gain, best = 0.0, throughput(0.0, 0, load, cost)
    for admitted, (loss, _, request) in enumerate(ranked[: room(load)], start=1):
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
        if sum(lengths) <= room(load)
    )
    planned = outcome(CausalPlanner().plan(current, load, cost), current, load, cost)
    assert planned == pytest.approx(best, rel=1e-9)


def outcome(
    lengths: NDArray[np.int64], current: CurrentScores, load: StepLoad, cost: StepCost
) -> float:
    """Expected tokens per second of a plan."""
    gain = sum(current.survival[r, :length].sum() for r, length in enumerate(lengths))
    return throughput(float(gain), int(lengths.sum()), load, cost)


def throughput(gain: float, admitted: int, load: StepLoad, cost: StepCost) -> float:
    """Expected tokens per second with `gain` more of them expected from `admitted` draft tokens."""
    target = cost.overhead_seconds + cost.verify_seconds(
        load.base_tokens + admitted, load.requests + admitted, load.context_tokens
    )
    draft = cost.draft_seconds(int(np.count_nonzero(load.caps))) if load.drafted else 0.0
    return float((load.requests + gain) / (target + draft))


def room(load: StepLoad) -> int:
    return max(load.max_batch_tokens - load.base_tokens, 0)
