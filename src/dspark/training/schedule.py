"""How learning rate and block size change over a run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Schedule:
    """Everything that changes over a run, as a function of its progress from 0 to 1."""

    learning_rate: float
    warmup: float  # share of the run
    block_size: int
    short_block: int  # block size of the first `short_share` of the run
    short_share: float

    def rate(self, progress: float) -> float:
        """Linear warm-up to ``learning_rate``, then a cosine to 0."""
        if progress < self.warmup:
            return self.learning_rate * max(progress, 1e-3) / self.warmup
        done = min((progress - self.warmup) / (1 - self.warmup), 1.0)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * done))

    def block(self, progress: float) -> int:
        return self.short_block if progress < self.short_share else self.block_size
