"""Where blocks start, and which of their labels count (DSpark training, drafters' shared rule)."""

import numpy as np
from numpy.typing import NDArray


def candidates(loss_mask: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Positions t with both t and t + 1 in the response: an anchor and at least one label.

    loss_mask: [L], true on response tokens.
    """
    return np.flatnonzero(loss_mask[:-1] & loss_mask[1:])


def sample(loss_mask: NDArray[np.bool_], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """At most ``count`` candidates, uniform without replacement, sorted."""
    positions = candidates(loss_mask)
    if len(positions) > count:
        positions = np.sort(rng.choice(positions, size=count, replace=False))
    return positions


def counted_labels(
    loss_mask: NDArray[np.bool_], anchors: NDArray[np.int64], block_size: int
) -> NDArray[np.bool_]:
    """[A, block_size]: whether label k (token anchor + k, k = 1..block_size) counts.

    It does inside the sequence, on the mask, and only if all earlier labels of its block do.
    """
    padded = np.concatenate([loss_mask, np.zeros(block_size, dtype=bool)])
    on_mask = padded[label_positions(anchors, block_size)]
    return np.logical_and.accumulate(on_mask, axis=1)


def label_positions(anchors: NDArray[np.int64], block_size: int) -> NDArray[np.int64]:
    """[A, block_size] positions of the labels; they may lie past the end of the sequence."""
    return anchors[:, None] + np.arange(1, block_size + 1)
