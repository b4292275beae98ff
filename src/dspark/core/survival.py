"""Survival scores: how likely each draft token is to be kept, as planners see it.

Several types on purpose. Current scores are computed from the very tokens that are about to be
judged; whoever lets them decide anything beyond the causal order of admission biases the output of
`rejection` mode. A function that takes `HistoricalScores` therefore does not type-check with
current ones, and one that searches current scores wants `DeterminedScores`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.types import VerificationMode


@dataclass(frozen=True, slots=True, eq=False)
class _Scores:
    survival: NDArray[np.float64]  # [R, block size] cumulative, non-increasing, 0 where not drafted

    def __post_init__(self) -> None:
        survival = np.array(self.survival, dtype=np.float64)
        if survival.ndim != 2:
            raise ValueError(f"survival must be [requests, block size], not {survival.shape}")
        if survival.size and not (survival.min() >= 0.0 and survival.max() <= 1.0):  # nor with NaN
            raise ValueError("survival must lie in [0, 1]: calibrate the confidences first")
        if (survival[:, 1:] > survival[:, :-1]).any():
            raise ValueError("survival must not rise along a block: it is a cumulative product")
        survival.flags.writeable = False
        object.__setattr__(self, "survival", survival)

    @classmethod
    def from_confidences(cls, rows: Sequence[ArrayLike], block_size: int) -> Self:
        """Scores from calibrated confidences c_k, one row of at most `block_size` per request.

        Raises ValueError for a row that is too long or holds values outside [0, 1].
        """
        confidences = np.zeros((len(rows), block_size))
        for request, row in enumerate(rows):
            if len(values := np.asarray(row, np.float64)) > block_size:
                raise ValueError(
                    f"request {request} has {len(values)} confidences, the block holds {block_size}"
                )
            confidences[request, : len(values)] = values
        return cls(np.cumprod(confidences, axis=1, dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class CurrentScores(_Scores):
    """Scores of the blocks this step is about to verify: they rank tokens, nothing else."""


@dataclass(frozen=True, slots=True, eq=False)
class DeterminedScores(CurrentScores):
    """Current scores of a step whose output no plan can change, so that they may decide anything.

    What `greedy` rows put out is a function of target and prompt alone.
    """

    @classmethod
    def of(cls, scores: CurrentScores, modes: Iterable[VerificationMode]) -> Self:
        """`scores` of drafts that are verified in these modes. Raises ValueError if one of them
        draws from the drafter's distribution."""
        if VerificationMode.REJECTION in modes:
            raise ValueError("scores of a step with rows in rejection mode may only rank")
        return cls(scores.survival)


@dataclass(frozen=True, slots=True, eq=False)
class HistoricalScores(_Scores):
    """Scores known before this step drafted anything: they may decide whatever they like."""
