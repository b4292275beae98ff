"""What a drafter's blocks promise on average, by verification mode."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dspark.core.types import VerificationMode

MEMORY = 200.0
"""Blocks after which an older one counts 1/e."""

UNKNOWN = 0.6
"""Confidence in each token of a drafter that was not seen at work yet."""


class Promise:
    """The mean of its calibrated survivals. They are known of every token that was drafted, trimmed
    ones included, so the mean leans to neither."""

    def __init__(self, block_size: int) -> None:
        unknown = UNKNOWN ** np.arange(1, block_size + 1, dtype=np.float64)
        self._survival = dict.fromkeys(VerificationMode, unknown)

    def record(
        self,
        modes: Sequence[VerificationMode],
        survival: NDArray[np.float64],
        lengths: NDArray[np.int64],
    ) -> None:
        """The survivals [N, block size] of N blocks, of which so many tokens [N] were drafted."""
        for mode in set(modes):
            rows = [each is mode for each in modes]
            own = survival[rows]
            drafted = np.arange(own.shape[1]) < lengths[rows, None]
            count = drafted.sum(axis=0)
            mean = own.sum(axis=0, where=drafted) / np.maximum(count, 1)
            kept = np.exp(-count / MEMORY)
            self._survival[mode] = kept * self._survival[mode] + (1.0 - kept) * mean

    def tokens(self, mode: VerificationMode, count: int) -> float:
        """Expected tokens kept of the first `count` of a block."""
        return float(self._survival[mode][:count].sum())
