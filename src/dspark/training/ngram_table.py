"""A backoff 4-gram table over training responses: the drafter that needs no network.

Every trained drafter is reported beside it, because not every one beats it.
"""

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

ORDER = 4
UNKNOWN = -1

_WIDTH = ORDER - 1  # longest context
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NgramTable:
    """Most frequent successor of the longest known context of one to three tokens."""

    def __init__(self, tables: Sequence[tuple[Keys, Ints]]) -> None:
        """tables: for context lengths 1, 2, 3: sorted context keys, and the successor of each."""
        self._tables = tables

    @classmethod
    def fit(cls, sequences: Iterable[tuple[Ints, NDArray[np.bool_]]]) -> Self:
        """Count n-grams. sequences: (token ids [L], loss mask [L]), at least one with a response.

        Only successors on the mask count, whatever their context is. Ties go to the smaller id.
        """
        keys: list[list[Keys]] = [[] for _ in range(_WIDTH)]
        successors: list[list[Ints]] = [[] for _ in range(_WIDTH)]
        for ids, mask in sequences:
            for length in range(1, min(_WIDTH, len(ids) - 1) + 1):
                contexts = np.lib.stride_tricks.sliding_window_view(ids[:-1], length)
                keys[length - 1].append(_keys(contexts)[mask[length:]])
                successors[length - 1].append(ids[length:][mask[length:]])
        return cls(
            [
                _most_frequent(np.concatenate(k), np.concatenate(s))
                for k, s in zip(keys, successors, strict=True)
                if k  # responses shorter than the context leave none
            ]
        )

    def predict(self, contexts: Ints) -> Ints:
        """contexts: [N, 3] last tokens, newest last, UNKNOWN before the start. Returns [N] ids,
        UNKNOWN where not even the newest token was seen."""
        predicted = np.full(len(contexts), UNKNOWN, dtype=np.int64)
        for length, (keys, successors) in enumerate(self._tables, 1):
            wanted = _keys(contexts[:, _WIDTH - length :])
            slot = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            known = keys[slot] == wanted
            predicted[known] = successors[slot[known]]
        return predicted

    def draft(self, ids: Ints, anchors: Ints, block_size: int) -> Ints:
        """Greedy blocks after positions ``anchors`` [A] of a sequence. Returns [A, block_size]."""
        padded = np.concatenate([np.full(_WIDTH, UNKNOWN), ids])
        contexts = padded[anchors[:, None] + 1 + np.arange(_WIDTH)]
        drafted = np.empty((len(anchors), block_size), dtype=np.int64)
        for k in range(block_size):
            drafted[:, k] = self.predict(contexts)
            contexts = np.concatenate([contexts[:, 1:], drafted[:, k, None]], axis=1)
        return drafted


def _keys(contexts: Ints) -> Keys:
    """[N, n] ids -> [N] polynomial hashes mod 2**64; UNKNOWN becomes 0, which no id does."""
    keys = np.zeros(len(contexts), dtype=np.uint64)
    for column in (contexts + 1).astype(np.uint64).T:
        keys = keys * _MULTIPLIER + column
    return keys


def _most_frequent(keys: Keys, successors: Ints) -> tuple[Keys, Ints]:
    """Every context's most frequent successor, by sorted context key."""
    order = np.lexsort((successors, keys))
    keys, successors = keys[order], successors[order]
    new = np.ones(len(keys), dtype=bool)
    new[1:] = (keys[1:] != keys[:-1]) | (successors[1:] != successors[:-1])
    first = np.flatnonzero(new)
    counts = np.diff(first, append=len(keys))
    order = np.lexsort((successors[first], -counts, keys[first]))
    unique, best = np.unique(keys[first][order], return_index=True)
    return unique, successors[first][order][best]
