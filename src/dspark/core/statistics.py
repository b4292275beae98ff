"""Figures that summarise decoding runs, and the two tests that say how far to trust them."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]

_MIN_EXPECTED = 5.0  # the usual least expected count for which chi-square's law is a fair one


def accepted_length(committed: ArrayLike) -> float:
    """Tokens committed per round, pooled over all rounds [N] of a set (the paper's τ, bonus
    included where there was one; not a mean of per-request means). Raises ValueError for none."""
    rounds = np.asarray(committed)
    if not rounds.size:
        raise ValueError("the accepted length of no rounds is undefined")
    return float(rounds.mean())


def verify_rate(committed: ArrayLike, admitted: ArrayLike) -> float:
    """Share of the verified tokens (anchors included) that were committed, over rounds [N]."""
    rounds = np.asarray(admitted)
    return float(np.sum(committed) / (rounds.sum() + rounds.size))


def prefix_survival(accepted: ArrayLike, admitted: ArrayLike, block_size: int) -> Array:
    """Share of the rounds with at least k admitted tokens that kept all k of them, k from 1; nan
    where there was no such round. Neighbours' ratios are the conditional acceptance."""
    kept, sent = np.asarray(accepted), np.asarray(admitted)
    positions = np.arange(1, block_size + 1)[:, None]
    rounds = (sent >= positions).sum(axis=1)
    survivors = (kept >= positions).sum(axis=1)
    return np.where(rounds > 0, survivors / np.maximum(rounds, 1), np.nan)


def chi_square_p_value(counts: ArrayLike, probabilities: ArrayLike) -> float:
    """Pearson's test: probability of counts [K] at least this far from `probabilities` [K].

    The rarest outcomes are pooled until each cell expects at least 5; an outcome of probability 0
    that occurred gives 0. Raises ValueError where fewer than two cells are left.
    """
    observed, p = np.asarray(counts, np.float64), np.asarray(probabilities, np.float64)
    if np.any(observed[p == 0] > 0):
        return 0.0
    order = np.argsort(p)
    observed, expected = observed[order], (p / p.sum() * observed.sum())[order]
    rare = np.searchsorted(expected, _MIN_EXPECTED)
    pooled = max(int(np.searchsorted(np.cumsum(expected), _MIN_EXPECTED)) + 1, int(rare))
    cells = np.concatenate(([0], np.arange(pooled, len(p))))
    if len(cells) < 2:
        raise ValueError("too few draws for a chi-square test: fewer than two cells expect 5")
    observed, expected = np.add.reduceat(observed, cells), np.add.reduceat(expected, cells)
    statistic = float(((observed - expected) ** 2 / expected).sum())
    return upper_gamma((len(cells) - 1) / 2, statistic / 2)


def upper_gamma(a: float, x: float) -> float:
    """Regularised upper incomplete gamma function Q(a, x), a > 0, x >= 0.

    Series below a + 1, Lentz's continued fraction above (Abramowitz and Stegun 6.5.29, 6.5.31).
    """
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        n = a
        while term > total * 1e-16:
            n += 1
            term *= x / n
            total += term
        return 1.0 - total * scale
    b, d = x + 1 - a, 1 / (x + 1 - a)
    c, fraction, change, i = math.inf, d, 0.0, 0
    while abs(change - 1) > 1e-15:
        i += 1
        numerator, b = i * (a - i), b + 2
        d, c = 1 / (b + numerator * d), b + numerator / c
        change = c * d
        fraction *= change
    return fraction * scale


def ratio_interval(
    sums: ArrayLike,
    counts: ArrayLike,
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """Percentile bootstrap interval of sum(sums) / sum(counts) over clusters [N] that are drawn
    whole. Raises ValueError without data."""
    above, below = _resampled_sums((sums, counts), rng, resamples)
    return _middle(above / below, confidence)


def gain_interval(
    own: tuple[ArrayLike, ArrayLike],
    other: tuple[ArrayLike, ArrayLike],
    rng: np.random.Generator,
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
) -> tuple[float, float]:
    """The like for one's ratio over another's, of (sums [N], counts [N]) each: cluster n of the one
    is paired with cluster n of the other. Raises ValueError without data, or with unequal N."""
    above, below, others, per = _resampled_sums((*own, *other), rng, resamples)
    return _middle(above / below / (others / per), confidence)


def _resampled_sums(
    columns: Sequence[ArrayLike], rng: np.random.Generator, resamples: int
) -> Array:
    """[columns, resamples] sums over clusters drawn with replacement, alike in all columns."""
    values = np.stack([np.asarray(column, np.float64) for column in columns])
    if not values.size:
        raise ValueError("an interval for the mean of no values is undefined")
    count = values.shape[1]
    drawn = (rng.integers(count, size=count) for _ in range(resamples))
    return np.stack([values[:, chosen].sum(axis=1) for chosen in drawn], axis=1)


def _middle(values: Array, confidence: float) -> tuple[float, float]:
    tail = (1 - confidence) / 2
    low, high = np.quantile(values, (tail, 1 - tail))
    return float(low), float(high)


def lower_quartile(times: ArrayLike) -> float:
    """Of measured times [N], one that was measured: the least of up to four. What held some of them
    up it does not see."""
    return float(np.quantile(np.asarray(times, np.float64), 0.25, method="lower"))
