"""Survival scores: how likely each draft token is to be kept, as planners see it.

Two types on purpose. Current scores are computed from the very tokens that are about to be judged;
whoever lets them decide anything beyond the causal order of admission biases the output. A function
that takes `HistoricalScores` therefore does not type-check with current ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    survival: NDArray[np.float64]  # [R, block size] cumulative, non-increasing, 0 where not drafted

    def __post_init__(self) -> None:
        survival = np.array(self.survival, dtype=np.float64)
        if survival.ndim != 2:
            raise ValueError(f"survival must be [requests, block size], not {survival.shape}")
        if not np.all((survival >= 0.0) & (survival <= 1.0)):
            raise ValueError("survival must lie in [0, 1]: calibrate the confidences first")
        if np.any(survival[:, 1:] > survival[:, :-1]):
            raise ValueError("survival must not rise along a block: it is a cumulative product")
        survival.flags.writeable = False
        object.__setattr__(self, "survival", survival)

    @classmethod
    def from_confidences(cls, rows: Sequence[ArrayLike], block_size: int) -> Self:
        """Scores from calibrated confidences c_k, one row of at most `block_size` per request.

        Raises ValueError for a row that is too long or holds values outside [0, 1].
        """
        survival = np.zeros((len(rows), block_size))
        for request, row in enumerate(rows):
            confidences = np.asarray(row, dtype=np.float64)
            if len(confidences) > block_size:
                raise ValueError(
                    f"request {request} has {len(confidences)} confidences, "
                    f"the block holds {block_size}"
                )
            survival[request, : len(confidences)] = np.cumprod(confidences)
        return cls(survival)


@dataclass(frozen=True, slots=True, eq=False)
class CurrentScores(_Scores):
    """Scores of the blocks this step is about to verify: they rank tokens, nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class HistoricalScores(_Scores):
    """Scores known before this step drafted anything: they may decide whatever they like."""
