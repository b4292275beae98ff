"""How good probabilities are: reliability diagrams and the scores drawn from them.

The error and its bins are those of DSpark's evaluation (20 of equal width over [0, 1], the survival
through a position against whether a block was accepted that far), here with what a perfect model
would measure beside it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

BINS = 20


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
    index = _bin(p, bins)
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


def ece_floor(probabilities: ArrayLike, bins: int = BINS) -> float:
    """The ECE that these predictions [N] are expected to show if each is exactly right.

    The gap of a bin is then a sum of centred Bernoulli variables, nearly normal with variance
    sum p (1 - p), and a normal variable is sqrt(2 / pi) standard deviations from its mean on
    average. An ECE near this says nothing about the model; 0 without data.
    """
    p = np.asarray(probabilities, np.float64)
    variance = np.bincount(_bin(p, bins), p * (1.0 - p), bins)
    return float(np.sqrt(2.0 / np.pi * variance).sum() / max(p.size, 1))


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


@dataclass(frozen=True, slots=True)
class PositionScores:
    """How well the survival through one block position was predicted, over `count` blocks."""

    count: int
    ece: float
    ece_floor: float  # what a perfect model would measure at this count
    brier: float
    auc: float | None  # None: every block was accepted that far, or none


def by_position(
    survival: ArrayLike, accepted: ArrayLike, admitted: ArrayLike
) -> tuple[PositionScores, ...]:
    """The scores of each position up to the last that was verified at all.

    Survival [N, K] as predicted, tokens accepted [N] and admitted [N]. Position j is judged by the
    blocks that admitted at least j tokens, with the label "accepted at least j".
    """
    predicted = np.asarray(survival, np.float64)
    accepted, admitted = np.asarray(accepted), np.asarray(admitted)
    scores = []
    for j in range(min(predicted.shape[1], int(admitted.max(initial=0)))):
        seen = admitted > j
        p, label = predicted[seen, j], accepted[seen] > j
        scores.append(
            PositionScores(
                count=len(p),
                ece=ece(p, label),
                ece_floor=ece_floor(p),
                brier=brier(p, label),
                auc=auc(p, label) if label.any() and not label.all() else None,
            )
        )
    return tuple(scores)


def _bin(p: Array, bins: int) -> NDArray[np.int64]:
    return np.minimum((p * bins).astype(np.int64), bins - 1)
