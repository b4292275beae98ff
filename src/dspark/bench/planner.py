"""How long a planner thinks: the time it adds to every step, without any model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from time import thread_time

import numpy as np

from dspark.core.cost import Curve, StepCost
from dspark.core.planner import Planner, StepLoad
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores

PLANNERS = ("none", "fixed:3", "threshold:0.6", "causal", "capacity")
SIZES = ((32, 7), (256, 7), (4096, 15))  # (requests, block size)
COST = StepCost(  # flat, then ever steeper; a token is worth verifying far into the batch
    tokens=Curve((1, 64, 512, 4096, 1 << 17), (0.020, 0.022, 0.030, 0.12, 2.0)),
    draft=Curve((1, 4096), (0.002, 0.010)),
    head_row_seconds=1e-6,
    context_token_seconds=1e-9,
    overhead_seconds=0.001,
)
HISTORY_BLOCKS = 64  # what the engine keeps
CONTEXT = 512  # tokens a request attends to


@dataclass(frozen=True, slots=True)
class PlannerTime:
    """Median CPU milliseconds of what a step asks of its planner: it only computes, on one core, so
    that what else the machine does need not count."""

    planner: str
    requests: int
    block_size: int
    outlook_ms: float  # before the draft: the gain to expect, and K
    plan_ms: float  # after it, where some row is in rejection mode
    determined_ms: float  # the same where none is
    verified_length: float  # 1 + mean length of the plan that was timed

    @property
    def step_ms(self) -> float:
        """A whole step of the slower kind."""
        return self.outlook_ms + max(self.plan_ms, self.determined_ms)


def measure(
    planners: Sequence[Planner], sizes: Sequence[tuple[int, int]], repeats: int
) -> list[PlannerTime]:
    """Time every planner on every size, over random survivals, with room for whole blocks."""
    return [_measure(planner, *size, repeats) for size in sizes for planner in planners]


def _measure(planner: Planner, requests: int, block_size: int, repeats: int) -> PlannerTime:
    rng = np.random.default_rng(requests)

    def survival(blocks: int) -> np.ndarray:
        return np.cumprod(rng.beta(4.0, 1.0, (blocks, block_size)), axis=1)

    history = HistoricalScores(survival(HISTORY_BLOCKS))
    current = CurrentScores(survival(requests))
    load = StepLoad(
        base_tokens=requests,
        context_tokens=requests * CONTEXT,
        caps=np.full(requests, planner.draft_length(block_size), np.int64),
        weights=np.ones(requests),
        capacity=requests * block_size,
    )
    planned = replace(load, capacity=planner.outlook(history, load, COST).capacity)
    determined, searched = replace(load, determined=True), DeterminedScores(current.survival)
    return PlannerTime(
        planner=planner.name,
        requests=requests,
        block_size=block_size,
        outlook_ms=_median_ms(lambda: planner.outlook(history, load, COST).throughput, repeats),
        plan_ms=_median_ms(lambda: planner.plan(current, planned, COST), repeats),
        determined_ms=_median_ms(lambda: planner.plan(searched, determined, COST), repeats),
        verified_length=1.0 + float(planner.plan(current, planned, COST).mean()),
    )


def _median_ms(call: Callable[[], object], repeats: int) -> float:
    call()  # what is computed once for a cost curve, every later step finds ready
    times = []
    for _ in range(repeats):
        started = thread_time()
        call()
        times.append(thread_time() - started)
    return 1e3 * median(times)
