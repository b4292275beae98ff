"""Offline calibration of confidences.

Sequential temperature scaling (DSpark paper, §3.2.1): position by position, the temperature T_k
that minimises the expected calibration error of the *survival* prod_{i<=k} sigmoid(l_i / T_i),
with the earlier temperatures held.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.reliability import brier, ece

Array = NDArray[np.float64]

GRID = tuple(np.geomspace(1 / 8, 8, 97).tolist())  # symmetric in the logarithm, 1 included


def apply(confidence_logits: ArrayLike, temperatures: ArrayLike) -> Array:
    """Calibrated confidences c_k [..., k], of k logits and at least as many temperatures."""
    logits = np.asarray(confidence_logits, np.float64)
    return sigmoid(logits / np.asarray(temperatures, np.float64)[: logits.shape[-1]])


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
            scaled = [survival[seen] * sigmoid(logits[seen, j] / t) for t in nearest_first]
            spread = np.array([brier(p, label) for p in scaled])
            errors = np.where(spread <= spread[0], [ece(p, label) for p in scaled], np.inf)
            temperatures[j] = nearest_first[np.argmin(errors)]
        survival[seen] *= sigmoid(logits[seen, j] / temperatures[j])
    return temperatures


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow at either end."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
