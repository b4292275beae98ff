"""Offline calibration of confidences.

Sequential temperature scaling (DSpark paper, §3.2.1), with an intercept: position by position, the
temperature T_k that minimises the expected calibration error of the *survival*
prod_{i<=k} sigmoid(l_i / T_i + b_i), where b_k puts its mean right and the earlier positions are
held. A temperature alone cannot move a mean, and that is what a confidence head gets wrong: on its
training data the drafter was accepted more often.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.reliability import brier, ece
from dspark.core.types import Scaling

Array = NDArray[np.float64]

GRID = tuple(np.geomspace(1 / 8, 8, 97).tolist())  # symmetric in the logarithm, 1 included

_LARGEST_INTERCEPT, _INTERCEPT_STEP = 8.0, 1e-4
_TIE = 1e-4  # errors this close say nothing about which is better


def scaled(confidence_logits: ArrayLike, scaling: Scaling) -> Array:
    """Calibrated logits [..., k], of k logits and a scaling of at least as many positions."""
    logits = np.asarray(confidence_logits, np.float64)
    positions = slice(logits.shape[-1])
    return np.asarray(
        logits / np.array(scaling.temperatures)[positions] + np.array(scaling.intercepts)[positions]
    )


def apply(confidence_logits: ArrayLike, scaling: Scaling) -> Array:
    """Calibrated confidences c_k [..., k]; as `scaled`."""
    return sigmoid(scaled(confidence_logits, scaling))


def fit_sts(
    confidence_logits: ArrayLike,
    accepted: ArrayLike,
    admitted: ArrayLike,
    *,
    grid: ArrayLike = GRID,
    min_count: int = 200,
) -> Scaling:
    """Of K positions, from N verified blocks: logits [N, K], tokens accepted [N], admitted [N].

    Position j learns from the blocks that admitted at least j tokens, with the label "accepted at
    least j"; what was not verified is unknown, not a failure. With fewer than `min_count` such
    blocks it stays as it is. Of equally good temperatures the one nearest to 1 is taken. One that
    worsens the Brier score is not: the ECE alone can be lowered by predicting the mean for every
    block, which is calibrated and tells a planner nothing.
    """
    logits = np.asarray(confidence_logits, np.float64)
    accepted, admitted = np.asarray(accepted), np.asarray(admitted)
    nearest_first = np.array(sorted(np.asarray(grid, np.float64), key=lambda t: abs(np.log(t))))
    temperatures, intercepts = np.ones(logits.shape[1]), np.zeros(logits.shape[1])
    survival = np.ones(logits.shape[0])
    for j in range(logits.shape[1]):
        seen = admitted > j
        own, before = logits[seen, j], survival[seen]
        if seen.sum() >= min_count:
            label = accepted[seen] > j
            shifts = np.array([_centred(own / t, before, label.mean()) for t in nearest_first])
            fits = [
                before * sigmoid(own / t + b) for t, b in zip(nearest_first, shifts, strict=True)
            ]
            spread = np.array([brier(p, label) for p in fits])
            errors = np.where(spread <= spread[0] + _TIE, [ece(p, label) for p in fits], np.inf)
            best = int(np.argmax(errors <= errors.min() + _TIE))
            temperatures[j], intercepts[j] = nearest_first[best], shifts[best]
        survival[seen] = before * sigmoid(own / temperatures[j] + intercepts[j])
    return Scaling(tuple(temperatures.tolist()), tuple(intercepts.tolist()))


def _centred(logits: Array, survival: Array, mean: float) -> float:
    """The intercept, by bisection, that makes ``survival * sigmoid(logits + b)`` [N] ``mean`` in
    the mean, or comes as near to it as a finite one can."""
    low, high = -_LARGEST_INTERCEPT, _LARGEST_INTERCEPT
    while high - low > _INTERCEPT_STEP:
        middle = (low + high) / 2
        if float((survival * sigmoid(logits + middle)).mean()) < mean:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), without overflow at either end."""
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * x)))
