"""The order in which draft tokens are admitted, without sorting what need not be sorted.

Tokens are kept by position: [block size, R]. Read row after row, that is the order in which equal
ones are taken: by position, then by request.
"""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from dspark.core.planner.interface import Lengths, StepLoad
from dspark.core.survival import CurrentScores

Values: TypeAlias = NDArray[np.float64]


def token_values(scores: CurrentScores, load: StepLoad) -> Values:
    """What each token is worth, [block size, R]: its survival times the weight of its request, 0
    if it may not be admitted. Values fall along a block, so the best of them are made of prefixes.
    """
    requests, block_size = scores.survival.shape
    if requests != load.requests:
        raise ValueError(f"a plan for {load.requests} requests got scores of {requests}")
    values = np.multiply(scores.survival.T, load.weights, order="C")
    values[np.arange(block_size)[:, None] >= load.caps] = 0.0
    return values


def ranked(values: Values) -> Values:
    """The values of all tokens that are worth something, falling, [N]."""
    ascending = np.sort(values, axis=None)
    return ascending[np.searchsorted(ascending, 0.0, side="right") :][::-1]


def admit(values: Values, count: int) -> Lengths:
    """The `count` tokens worth most, as a length for each request, [R]; never a worthless one.

    Ties go to the earlier position, then to the earlier request.
    """
    admitted = values > 0.0
    surplus = int(np.count_nonzero(admitted)) - count
    if surplus > 0:
        first = values.size - count  # where the least of them stands in ascending order
        least = np.partition(values, first, axis=None)[first] if count else np.inf
        admitted = values > least
        equal = np.flatnonzero(values == least)
        admitted.flat[equal[: count - np.count_nonzero(admitted)]] = True
    return np.asarray(np.count_nonzero(admitted, axis=0), np.int64)
