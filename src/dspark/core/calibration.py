"""Calibration of confidences, and the scores that say how good it is.

Sequential temperature scaling (DSpark paper, §3.2.1): position by position, the temperature T_k
that minimises the expected calibration error of the *survival* prod_{i<=k} sigmoid(l_i / T_i),
with the earlier temperatures held.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

BINS = 20
GRID = tuple(np.geomspace(1 / 8, 8, 97).tolist())  # symmetric in the logarithm, 1 included


def apply(confidence_logits: ArrayLike, temperatures: ArrayLike) -> Array:
    """Calibrated confidences c_k [..., k], of k logits and at least as many temperatures."""
    logits = np.asarray(confidence_logits, np.float64)
    return _sigmoid(logits / np.asarray(temperatures, np.float64)[: logits.shape[-1]])


def fit_sts(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    admitted: ArrayLike,
    *,
    grid: ArrayLike = GRID,
    min_count: int = 200,
) -> Array:
    """Temperatures [K] from N verified blocks: logits [N, K], tokens accepted [N], admitted [N].

    Position j learns from the blocks that admitted at least j tokens, with the label "accepted at
    least j"; what was not verified is unknown, not a failure. With fewer than `min_count` such
    blocks it keeps temperature 1. Of equally good temperatures the one nearest to 1 is taken. One
    that worsens the Brier score is not: the ECE alone can be lowered by predicting the mean for
    every block, which is calibrated and tells a planner nothing.
    """
    logits = np.asarray(confidence_logits, np.float64)
    accepted, admitted = np.asarray(accepted), np.asarray(admitted)
    nearest_first = np.array(sorted(np.asarray(grid, np.float64), key=lambda t: abs(np.log(t))))
    temperatures = np.ones(logits.shape[1])
    survival = np.ones(logits.shape[0])
    for j in range(logits.shape[1]):
        seen = admitted > j
        if seen.sum() >= min_count:
            label = accepted[seen] > j
            scaled = [survival[seen] * _sigmoid(logits[seen, j] / t) for t in nearest_first]
            spread = np.array([brier(p, label) for p in scaled])
            errors = np.where(spread <= spread[0], [ece(p, label) for p in scaled], np.inf)
            temperatures[j] = nearest_first[np.argmin(errors)]
        survival[seen] *= _sigmoid(logits[seen, j] / temperatures[j])
    return temperatures


@dataclass(frozen=True, slots=True, eq=False)
class Reliability:
    """Equal-width bins over [0, 1]: how many predictions, their mean, the share that came true.
    Empty bins hold 0 in all three."""

    count: NDArray[np.int64]  # [bins]
    predicted: Array  # [bins]
    observed: Array  # [bins]


def reliability(probabilities: ArrayLike, labels: ArrayLike, bins: int = BINS) -> Reliability:
    """The reliability diagram of predictions [N] in [0, 1] against labels [N] in {0, 1}."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels, np.float64)
    index = np.minimum((p * bins).astype(np.int64), bins - 1)
    count = np.bincount(index, minlength=bins)
    shares = np.maximum(count, 1)
    return Reliability(
        count=count,
        predicted=np.bincount(index, p, bins) / shares,
        observed=np.bincount(index, y, bins) / shares,
    )


def ece(probabilities: ArrayLike, labels: ArrayLike, bins: int = BINS) -> float:
    """Expected calibration error, sum of n_b / N * |predicted - observed|; 0 without data."""
    diagram = reliability(probabilities, labels, bins)
    gaps = np.abs(diagram.predicted - diagram.observed)
    return float(diagram.count @ gaps / max(diagram.count.sum(), 1))


def brier(probabilities: ArrayLike, labels: ArrayLike) -> float:
    """Mean squared error of the probabilities. Raises ValueError without data."""
    p, y = np.asarray(probabilities, np.float64), np.asarray(labels, np.float64)
    if not p.size:
        raise ValueError("the Brier score of no predictions is undefined")
    return float(np.mean((p - y) ** 2))


def auc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a positive scores above a negative, ties counted half (Mann-Whitney).

    Raises ValueError unless both labels occur.
    """
    y = np.asarray(labels, bool)
    positives, negatives = int(y.sum()), int((~y).sum())
    if not positives or not negatives:
        raise ValueError("an AUC needs both labels")
    _, index, ties = np.unique(np.asarray(scores), return_inverse=True, return_counts=True)
    mean_rank = np.cumsum(ties) - (ties - 1) / 2  # 1-based
    excess = mean_rank[index][y].sum() - positives * (positives + 1) / 2
    return float(excess / (positives * negatives))


def _sigmoid(x: Array) -> Array:
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))  # no overflow at either end
