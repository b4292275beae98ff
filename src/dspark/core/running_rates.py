"""Shares of outcomes that went well, by class, of what happened lately."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

MEMORY = 1000
"""Outcomes of a class after which an older one counts 1/e."""

PRIOR_OUTCOMES = 20.0
"""How many outcomes the rates to start from are worth."""


class RunningRates:
    """One rate for each of N classes."""

    def __init__(self, prior: Sequence[float]) -> None:
        """``prior``: the rates [N] to start from, between 0 and 1."""
        self._good = PRIOR_OUTCOMES * np.array(prior, np.float64)
        self._seen = np.full(len(prior), PRIOR_OUTCOMES)

    def record(self, index: int, good: bool) -> None:
        """An outcome of class ``index``."""
        kept = 1.0 - 1.0 / MEMORY
        self._good[index] = kept * self._good[index] + good
        self._seen[index] = kept * self._seen[index] + 1.0

    def rates(self) -> NDArray[np.float64]:
        """[N]"""
        return np.asarray(self._good / self._seen, np.float64)
