"""Logits as the acceptance rule meets them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from dspark.modeling.sampling import argmax


@dataclass(frozen=True)
class GivenRows:
    """TargetRows of logits [N, V] that a test made up."""

    all_logits: Tensor

    def argmax(self, rows: Sequence[int]) -> NDArray[np.int64]:
        return argmax(self.logits(rows))

    def logits(self, rows: Sequence[int]) -> Tensor:
        return self.all_logits[list(rows)]
