"""Uniforms are uniform, and keys that differ give unrelated ones. The keys are fixed: no flakes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.core.rng import Purpose, uniform
from dspark.core.statistics import chi_square_p_value

WORDS = st.integers(0, 2**64 - 1)
COUNT = 40_000

STREAMS = {
    "index": lambda n: uniform(7, 3, Purpose.DRAFT, np.arange(n)),
    "step": lambda n: uniform(7, np.arange(n), Purpose.ACCEPT, np.zeros(n, np.int64)),
    "nonce": lambda n: uniform(np.arange(n), 0, Purpose.BONUS, np.zeros(n, np.int64)),
    "high bits of the nonce": lambda n: uniform(
        np.arange(n, dtype=np.uint64) << np.uint64(44), 1, Purpose.DRAFT, np.zeros(n, np.int64)
    ),
}


def p_value_of_uniformity(values: NDArray[np.float64], cells: int) -> float:
    counts = np.bincount((values * cells).astype(np.int64), minlength=cells)
    return chi_square_p_value(counts, np.full(cells, 1 / cells))


@given(nonce=WORDS, step=WORDS, index=st.integers(0, 2**63 - 1))
def test_arrays_and_integers_agree(nonce: int, step: int, index: int) -> None:
    one = uniform(nonce, step, Purpose.RESIDUAL, index)
    many = uniform(
        np.array([nonce], np.uint64),
        np.array([step], np.uint64),
        Purpose.RESIDUAL,
        np.array([index]),
    )
    assert one == many[0]
    assert 0 <= one < 1


@pytest.mark.parametrize("stream", STREAMS)
def test_each_stream_is_uniform(stream: str) -> None:
    values = STREAMS[stream](COUNT)
    assert 1e-4 < p_value_of_uniformity(values, 256) < 1 - 1e-4
    low_bits = values * 2**45 % 1  # the last 8 of the 53 bits
    assert 1e-4 < p_value_of_uniformity(low_bits, 256) < 1 - 1e-4


@pytest.mark.parametrize("stream", STREAMS)
def test_neighbours_in_a_stream_are_independent(stream: str) -> None:
    values = STREAMS[stream](COUNT)
    pairs = np.floor(values[:-1] * 16) * 16 + np.floor(values[1:] * 16)
    assert p_value_of_uniformity(pairs / 256, 256) > 1e-4


@pytest.mark.parametrize(
    ("one", "other"), [(a, b) for a in Purpose for b in Purpose if a < b], ids=str
)
def test_purposes_are_independent(one: Purpose, other: Purpose) -> None:
    index = np.arange(COUNT)
    pairs = np.floor(uniform(1, 2, one, index) * 16) * 16 + np.floor(
        uniform(1, 2, other, index) * 16
    )
    assert p_value_of_uniformity(pairs / 256, 256) > 1e-4


def test_small_keys_never_collide() -> None:
    grid = [a.ravel() for a in np.meshgrid(np.arange(40), np.arange(40), np.arange(16))]
    values = [uniform(grid[0], grid[1], purpose, grid[2]) for purpose in Purpose]
    assert len(np.unique(values)) == 40 * 40 * 16 * len(Purpose)
