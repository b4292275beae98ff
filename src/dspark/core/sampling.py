"""The sampling transform in fp64: temperature, then top-k, then top-p, then softmax.

Both cuts keep ties: every logit equal to the smallest kept one is kept too. A kept set is then
always "all logits at or above a threshold", which one number describes.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

Rows = NDArray[np.float64]


def transform(logits: ArrayLike, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Rows:
    """Probabilities [..., V] from logits [..., V]. `top_k` 0 and `top_p` 1 are off.

    Top-k keeps the k highest logits; top-p then keeps the smallest set of the likeliest tokens
    whose share of what top-k left reaches p. Raises ValueError for a temperature that is not above
    0 (greedy rows take an argmax, they do not sample), top_k < 0, or top_p outside (0, 1].
    """
    scaled = _scale(logits, temperature)
    return _softmax(np.where(scaled >= _lowest_kept(scaled, top_k, top_p), scaled, -np.inf))


def cut_threshold(
    logits: ArrayLike, temperature: float, top_k: int = 0, top_p: float = 1.0
) -> Rows:
    """The cut of each row as one number [...]: keep where `logits / temperature >= threshold`.

    It lies midway between the lowest kept and the highest removed scaled logit, so that a row
    recomputed with rounding noise keeps the same set; -inf where nothing is removed.
    """
    scaled = _scale(logits, temperature)
    lowest = _lowest_kept(scaled, top_k, top_p)
    removed = np.where(scaled < lowest, scaled, -np.inf).max(axis=-1)
    lowest = lowest[..., 0]
    middle = (lowest + removed) / 2
    return np.where((middle > removed) | np.isneginf(removed), middle, lowest)


def inverse_cdf(probabilities: ArrayLike, u: float) -> int:
    """The token at quantile `u` in [0, 1) of non-negative weights [V] (they need not sum to 1).

    Never a token of weight 0. Raises ValueError if all weights are 0 or one is not finite.
    """
    cdf = np.cumsum(np.asarray(probabilities, dtype=np.float64))
    total = cdf[-1]
    if not (np.isfinite(total) and total > 0):
        raise ValueError(f"cannot draw from weights that sum to {total}")
    last = np.searchsorted(cdf, total)  # the product below may round up to the total
    return int(min(np.searchsorted(cdf, u * total, side="right"), last))


def _scale(logits: ArrayLike, temperature: float) -> Rows:
    if not temperature > 0:
        raise ValueError(f"temperature must be above 0 to sample, got {temperature}")
    return np.asarray(logits, dtype=np.float64) / temperature


def _lowest_kept(scaled: Rows, top_k: int, top_p: float) -> Rows:
    """The smallest scaled logit each row keeps, [..., 1]."""
    if top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(f"top_k must be >= 0 and top_p in (0, 1], got {top_k} and {top_p}")
    falling = -np.sort(-scaled, axis=-1)
    vocabulary = falling.shape[-1]
    lowest = falling[..., min(top_k or vocabulary, vocabulary) - 1, None]
    if top_p < 1:
        mass = np.cumsum(_softmax(np.where(falling >= lowest, falling, -np.inf)), axis=-1)
        needed = (mass < top_p * mass[..., -1:]).sum(axis=-1, keepdims=True)
        lowest = np.take_along_axis(falling, needed, axis=-1)
    return lowest


def _softmax(logits: Rows) -> Rows:
    weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
