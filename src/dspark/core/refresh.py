"""The cost surface kept current from the steps that are served.

A profile is measured once, on a machine that does nothing else; clocks, neighbours and contexts
change afterwards. Every `BATCH` steps become one Bayesian update of the surface so far: a factor
that all of its terms share (the machine became slower), and a factor for each term (its shape is
another). The fit is ridge regression on measured over expected seconds, so a term moves by what the
steps say of it: one that no step identifies keeps its ratio to the others.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.core.cost import SHORTEST, Curve, StepCost

Floats: TypeAlias = NDArray[np.float64]

BATCH = 32  # steps of one update
_SHARED_PRIOR = 16.0  # steps that must speak against the surface to move all of it half way
_TERM_PRIOR = 32.0  # the same for one of its terms
_LARGEST_JUMP = 2.0  # most by which a step counts as slower, or as faster, than expected
_LARGEST_SPREAD = 1.25  # most by which a step counts as off the median of its batch
_SMALLEST_SLOPES = np.array([1e-2, 1e-4])  # of a head row and a context token, over the seconds of
# the smallest step: below these a slope is learned by adding, so that one of 0 can be


@dataclass(frozen=True, slots=True)
class StepTime:
    """What one step held and took. Seconds are finite and not negative."""

    batch_tokens: int  # B, as the verifier counted it: 1 or more
    head_rows: int
    context_tokens: int
    verify_seconds: float
    draft_rows: int  # sequences that drafted a whole block each; 0: this step says nothing of it
    draft_seconds: float
    overhead_seconds: float  # outside both models


class CostRefresher:
    """Turns step times into ever newer surfaces.

    Guarantees, whatever is measured: surfaces are valid (`StepCost`), monotone in B, and the same
    for the same steps. A step counts as at most 25 % off the median of its batch, and as at most
    twice or half of what was expected, so that a batch full of outliers moves no expectation by
    more than three quarters. A drafter whose cost is not known stays unknown.
    """

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self._steps: list[StepTime] = []

    def observe(self, step: StepTime) -> StepCost | None:
        """Take a step. Every `BATCH` of them give a new surface, also found in `cost`."""
        self._steps.append(step)
        if len(self._steps) < BATCH:
            return None
        self.cost = _updated(self.cost, self._steps)
        self._steps = []
        return self.cost


def _updated(cost: StepCost, steps: Sequence[StepTime]) -> StepCost:
    batch = np.array([step.batch_tokens for step in steps], np.int64)
    rows = np.array([(step.head_rows, step.context_tokens) for step in steps], np.float64)
    seconds = np.array([step.verify_seconds for step in steps])
    slopes = np.array([cost.head_row_seconds, cost.context_token_seconds])
    units = np.maximum(slopes, cost.tokens.seconds[0] * _SMALLEST_SLOPES)
    parts = np.hstack([_shares(cost.tokens, batch), rows * units])
    known = np.concatenate([np.ones(len(cost.tokens.counts)), slopes / units])
    factors, evidence = _factors(parts, known, seconds)
    drafted = [step for step in steps if step.draft_rows]
    overhead = float(np.median([step.overhead_seconds for step in steps]))
    gain = len(steps) / (len(steps) + _SHARED_PRIOR)
    return replace(
        cost,
        tokens=_scaled(cost.tokens, factors[:-2], evidence[:-2]),
        draft=_draft_updated(cost.draft, drafted) if cost.draft and drafted else cost.draft,
        head_row_seconds=float(units[0] * factors[-2]),
        context_token_seconds=float(units[1] * factors[-1]),
        overhead_seconds=cost.overhead_seconds + gain * (overhead - cost.overhead_seconds),
    )


def _draft_updated(curve: Curve, steps: Sequence[StepTime]) -> Curve:
    rows = np.array([step.draft_rows for step in steps], np.int64)
    seconds = np.array([step.draft_seconds for step in steps])
    return _scaled(curve, *_factors(_shares(curve, rows), np.ones(len(curve.counts)), seconds))


def _shares(curve: Curve, counts: NDArray[np.int64]) -> Floats:
    """How much of a curve's seconds at `counts` [N] each of its points contributes, [N, points].

    What lies outside the grid moves in proportion to the nearest point.
    """
    x, y = np.asarray(curve.counts), np.asarray(curve.seconds)
    right = np.clip(np.searchsorted(x, counts), 0, len(x) - 1)
    left = np.maximum(right - 1, 0)
    if curve.tiered:
        part = np.ones(len(counts))
    else:
        part = np.clip((counts - x[left]) / np.maximum(x[right] - x[left], 1), 0.0, 1.0)
    shares = np.zeros((len(counts), len(x)))
    step = np.arange(len(counts))
    shares[step, left] += (1.0 - part) * y[left]
    shares[step, right] += part * y[right]
    shares[counts < x[0]] = 0.0
    shares[counts < x[0], 0] = y[0]
    beyond = counts > x[-1]
    shares[beyond, -1] = curve(counts[beyond])
    return shares


def _factors(parts: Floats, known: Floats, seconds: Floats) -> tuple[Floats, Floats]:
    """How many units each of T terms has now, and how many steps spoke of it.

    `parts @ known` are the seconds expected, `parts` [N, T] those of one unit of each term, and
    `known` [T] how many units it has. Minimises, over a shared factor s and the new units f,

        |ratio - parts f / expected|² + term_prior |f - s known|² + shared_prior (s - 1)²
    """
    expected = np.maximum(parts @ known, SHORTEST)
    ratio = _clamped(seconds / expected)
    relative = parts / expected[:, None]
    columns = np.hstack([np.ones((len(ratio), 1)), relative])
    ridge = np.full(columns.shape[1], _TERM_PRIOR)
    ridge[0] = _SHARED_PRIOR
    moves = np.linalg.solve(columns.T @ columns + np.diag(ridge), columns.T @ (ratio - 1.0))
    factors = np.maximum((1.0 + moves[0]) * known + moves[1:], 0.0)
    return factors, np.square(relative).sum(axis=0)


def _clamped(ratio: Floats) -> Floats:
    middle = np.median(ratio)
    near = np.clip(ratio, middle / _LARGEST_SPREAD, middle * _LARGEST_SPREAD)
    return np.clip(near, 1.0 / _LARGEST_JUMP, _LARGEST_JUMP)


def _scaled(curve: Curve, factors: Floats, evidence: Floats) -> Curve:
    """The non-decreasing curve nearest to the scaled one, points of more evidence moving less."""
    seconds = np.maximum(np.asarray(curve.seconds) * factors, SHORTEST)
    return replace(curve, seconds=tuple(_isotonic(seconds, evidence + _TERM_PRIOR).tolist()))


def _isotonic(values: Floats, weights: Floats) -> Floats:
    """Weighted least-squares fit that does not fall: neighbours that would are pooled."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, size
    for value, weight in zip(values.tolist(), weights.tolist(), strict=True):
        size = 1
        while pools and pools[-1][0] >= value:
            mean, pooled, count = pools.pop()
            value = (mean * pooled + value * weight) / (pooled + weight)
            weight, size = pooled + weight, size + count
        pools.append((value, weight, size))
    return np.repeat([value for value, _, _ in pools], [size for _, _, size in pools])
