"""Counter-based random numbers: a uniform is a pure function of its key, so nothing is ever rolled
back, shared or drawn twice, and every process computes the same one.

The key is absorbed word by word, each time through the SplitMix64 finaliser (Steele, Lea and Flood,
"Fast splittable pseudorandom number generators", 2014). The mapping is frozen by golden values in
the tests: changing it changes every sampled text.
"""

from enum import IntEnum
from operator import index as as_int
from typing import Any, TypeAlias, overload

import numpy as np
from numpy.typing import NDArray

Words: TypeAlias = NDArray[np.int64] | NDArray[np.uint64]

_MASK = 2**64 - 1
_WEYL = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a uniform decides. `index` is the 0-based position in the block for all of them.

    DRAFT: draws draft token `index`. ACCEPT: tests draft token `index`. RESIDUAL: draws the
    correction after draft token `index` was rejected. BONUS: draws the target's own token behind
    `index` accepted draft tokens (0 without a draft).
    """

    DRAFT = 0
    ACCEPT = 1
    RESIDUAL = 2
    BONUS = 3


@overload
def uniform(nonce: int, step: int, purpose: Purpose, index: int) -> float: ...
@overload
def uniform(
    nonce: int | Words, step: int | Words, purpose: Purpose, index: Words
) -> NDArray[np.float64]: ...
def uniform(
    nonce: int | Words, step: int | Words, purpose: Purpose, index: int | Words
) -> float | NDArray[np.float64]:
    """Uniforms in [0, 1) with 53 random bits; with an array of `index` the arguments broadcast.

    Raises OverflowError for an integer outside [0, 2**64).
    """
    state: Any = 0
    for word in (nonce, step, purpose, index):
        state = _mix(((state ^ _unsigned(word)) + _WEYL) & _MASK)
    values: float | NDArray[np.float64] = (state >> 11) * 2.0**-53
    return values


def _unsigned(word: int | Words) -> int | NDArray[np.uint64]:
    if isinstance(word, np.ndarray):
        return word.astype(np.uint64)
    word = as_int(word)  # numpy's own scalars warn when they wrap around
    if not 0 <= word <= _MASK:
        raise OverflowError(f"{word} does not fit into 64 unsigned bits")
    return word


def _mix(word: Any) -> Any:
    """SplitMix64's finaliser, a bijection of 64-bit words in which every input bit matters.

    For ints and arrays of uint64 alike: ints are fast for one value, and the mask that keeps them
    to 64 bits does nothing to an array, which wraps around by itself.
    """
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & _MASK
    return word ^ (word >> 31)
