"""Planners: how many draft tokens of each request the target verifies in a step.

A planner runs after the drafts are in. To keep the output law exact it may admit token k of a
request without looking at that token or at anything behind it, so everything here walks candidates
in the order of their survival and judges each by those before it only. Decisions of another kind
(whether to draft at all) are taken from history, with `expected_gain`.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dspark.core.cost import StepCost
from dspark.core.errors import ConfigError
from dspark.core.survival import CurrentScores, HistoricalScores

Lengths = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class StepLoad:
    """What a step carries besides its drafts; all of it fixed before the drafts are known."""

    requests: int  # R: rows that commit in this step
    base_tokens: int  # rows of the target step without any draft: anchors and prefill chunks
    context_tokens: int  # C: context tokens all rows attend to
    caps: Lengths  # [R] most draft tokens a row may verify, from committed state only; 0: no draft
    max_batch_tokens: int  # most rows of a target step
    drafted: bool = True  # the step pays for a draft


class Planner(Protocol):
    """A policy. Stateless: everything it may look at is passed in."""

    @property
    def name(self) -> str: ...

    @property
    def adaptive(self) -> bool:
        """Whether the draft itself may be skipped in steps where it does not pay."""
        ...

    def draft_length(self, block_size: int) -> int:
        """Tokens worth drafting for a request, 0..block_size."""
        ...

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        """Draft tokens to verify, [R], at most `load.caps` and within `load.max_batch_tokens`."""
        ...


class NonePlanner:
    """Plain decoding: nothing is drafted, nothing is verified."""

    name = "none"
    adaptive = False

    def draft_length(self, block_size: int) -> int:
        return 0

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        return np.zeros(load.requests, np.int64)


class FixedPlanner:
    """Always the first `length` draft tokens; if the step is too full for that, fewer for all."""

    adaptive = False

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ConfigError(f"A fixed plan needs a length of at least 1, got {length}.")
        self.length = length
        self.name = f"fixed:{length}"

    def draft_length(self, block_size: int) -> int:
        return min(self.length, block_size)

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        wanted = np.minimum(load.caps, self.length)
        candidates = np.arange(self.length)[:, None] < wanted  # [length, R], by position
        admitted = np.flatnonzero(candidates)[: _room(load)]
        return np.bincount(admitted % load.requests, minlength=load.requests).astype(np.int64)


class CausalPlanner:
    """Admits the likeliest tokens while expected tokens per second strictly rise, and stops at the
    first decline (Algorithm 1 of the DSpark paper, over the cost of the whole step).

    Stopping there, although a better plan may lie further on, is what makes it lossless: whether a
    token is admitted depends on scores at least as high as its own, never on what follows it.
    """

    name = "causal"
    adaptive = True

    def draft_length(self, block_size: int) -> int:
        return block_size

    def plan(self, scores: CurrentScores, load: StepLoad, cost: StepCost) -> Lengths:
        survival, requests = _ranked(scores.survival, load)
        tokens, seconds = _prospects(survival, load, cost, drafted=load.drafted)
        count = int(_first_decline(tokens / seconds))
        return np.bincount(requests[:count], minlength=load.requests).astype(np.int64)


def expected_gain(scores: HistoricalScores, load: StepLoad, cost: StepCost) -> tuple[float, float]:
    """Expected tokens per second (without a draft, with a draft and causal plans).

    `scores` is a sample of N blocks, for any N. It is dealt out into steps of as many blocks as
    requests may draft (caps above 0), and each step planned as `CausalPlanner` would: where that
    stops at a bump of the cost curve, there is no gain to expect behind it. The second figure pays
    for the draft whatever is then verified, and may be the smaller one.
    """
    sample, drafting = scores.survival, int(np.count_nonzero(load.caps))
    steps = max(len(sample) // max(drafting, 1), 1)
    blocks = np.resize(sample, (steps, drafting * sample.shape[1]))
    ranked = -np.sort(-blocks, axis=1)[:, : _room(load)]
    tokens, seconds = _prospects(ranked, load, cost, drafted=True)
    counts = _first_decline(tokens / seconds)
    plain_tokens, plain_seconds = _prospects(ranked[:, :0], load, cost, drafted=False)
    return (
        float(plain_tokens[0, 0] / plain_seconds[0]),
        float(tokens[np.arange(steps), counts].sum() / seconds[counts].sum()),
    )


def _ranked(survival: NDArray[np.float64], load: StepLoad) -> tuple[NDArray[np.float64], Lengths]:
    """Admissible tokens in order of admission: their survival [N] and their request [N].

    Survival falls; ties go to the earlier position, then to the earlier request, so that every
    head of the list is made of prefixes.
    """
    if survival.shape[0] != load.requests or load.caps.shape != (load.requests,):
        raise ValueError(
            f"a plan for {load.requests} requests got scores of {survival.shape[0]} "
            f"and caps of shape {load.caps.shape}"
        )
    by_position = survival.T  # [block size, R]: flattening this puts earlier positions first
    admissible = (np.arange(len(by_position))[:, None] < load.caps) & (by_position > 0)
    candidates = np.flatnonzero(admissible)
    values = by_position.ravel()[candidates]
    order = np.argsort(-values, kind="stable")[: _room(load)]
    return values[order], candidates[order] % load.requests


def _prospects(
    survival: NDArray[np.float64], load: StepLoad, cost: StepCost, *, drafted: bool
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Expected tokens [..., N + 1] and seconds [N + 1] of a step that admits the first 0..N of the
    ranked tokens, given by their survival [..., N]."""
    tokens = np.full((*survival.shape[:-1], survival.shape[-1] + 1), float(load.requests))
    tokens[..., 1:] += np.cumsum(survival, axis=-1)
    admitted = np.arange(tokens.shape[-1])
    seconds = cost.overhead_seconds + cost.verify_seconds(
        load.base_tokens + admitted, load.requests + admitted, load.context_tokens
    )
    return tokens, seconds + (
        cost.draft_seconds(int(np.count_nonzero(load.caps))) if drafted else 0.0
    )


def _first_decline(throughput: NDArray[np.float64]) -> Lengths:
    """How many tokens to admit, [...], of throughputs after admitting 0..N, [..., N + 1]: as long
    as each one raises it."""
    stops = np.ones(throughput.shape, dtype=bool)  # the last one: there is nothing left to admit
    stops[..., :-1] = throughput[..., 1:] <= throughput[..., :-1]
    return np.asarray(stops.argmax(axis=-1), dtype=np.int64)


def _room(load: StepLoad) -> int:
    return max(load.max_batch_tokens - load.base_tokens, 0)
