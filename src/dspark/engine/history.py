"""What recent drafts were worth: the only thing the draft gate knows about the drafter."""

import numpy as np
from numpy.typing import NDArray

from dspark.core.survival import HistoricalScores

_PRIOR_TOKENS = 1.0  # how many tokens of evidence the claims of an unknown drafter are worth


class History:
    """Survival scores of the last `window` drafted blocks, corrected by how they turned out.

    Whole blocks are kept, and not their mean by position, because a planner lives on the spread: it
    verifies the likely blocks and trims the rest. The correction is one factor, accepted over
    expected tokens where the target judged them, forgotten at the pace of the window.
    """

    def __init__(self, block_size: int, window: int = 64) -> None:
        self._blocks = np.zeros((window, block_size))
        self._count = 0  # blocks ever recorded; the next one replaces the oldest
        self._decay = 1.0 - 1.0 / window
        self._accepted = 0.0
        self._expected = 0.0

    def __len__(self) -> int:
        return min(self._count, len(self._blocks))

    def record(self, survival: NDArray[np.float64], admitted: int, accepted: int) -> None:
        """Add a judged block: its survival scores [block size], how many of its tokens the target
        saw and how many it kept. This is where current scores become historical ones."""
        self._blocks[self._count % len(self._blocks)] = survival
        self._count += 1
        self._accepted = self._accepted * self._decay + accepted
        self._expected = self._expected * self._decay + float(survival[:admitted].sum())

    @property
    def realism(self) -> float:
        """Accepted over expected tokens: below 1, the drafter promises too much."""
        return (self._accepted + _PRIOR_TOKENS) / (self._expected + _PRIOR_TOKENS)

    def scores(self) -> HistoricalScores:
        """The kept blocks, corrected, [len(self), block size]."""
        return HistoricalScores(np.minimum(self._blocks[: len(self)] * self.realism, 1.0))
