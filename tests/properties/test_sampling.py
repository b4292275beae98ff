"""The kept set is what its threshold says, and draws follow the probabilities."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from dspark.core.rng import Purpose, uniform
from dspark.core.sampling import cut_threshold, inverse_cdf, transform
from dspark.core.statistics import chi_square_p_value

LOGITS = st.lists(
    st.floats(-30, 30) | st.sampled_from([-np.inf, 0.0, 0.0, 1.0]), min_size=2, max_size=12
).map(np.array)
FINITE = LOGITS.filter(lambda row: np.isfinite(row).any())
TEMPERATURES = st.floats(0.05, 5)
TOP_K = st.integers(0, 14)
TOP_P = st.floats(1e-6, 1)


@given(logits=FINITE, temperature=TEMPERATURES, top_k=TOP_K, top_p=TOP_P)
def test_the_threshold_reproduces_the_distribution(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> None:
    p = transform(logits, temperature, top_k, top_p)
    threshold = cut_threshold(logits, temperature, top_k, top_p)
    rebuilt = np.where(logits / temperature >= threshold, logits, -np.inf)
    np.testing.assert_array_equal(transform(rebuilt, temperature), p)


@given(logits=FINITE, temperature=TEMPERATURES, top_k=TOP_K, top_p=TOP_P)
def test_the_cut_is_sufficient_and_minimal(
    logits: NDArray[np.float64], temperature: float, top_k: int, top_p: float
) -> None:
    after_top_k = transform(logits, temperature, top_k)
    kept = transform(logits, temperature, top_k, top_p) > 0
    assert after_top_k[kept].sum() >= top_p - 1e-12
    least_likely = after_top_k[kept].min()
    assert after_top_k[after_top_k > least_likely].sum() < top_p + 1e-12


@given(
    weights=st.lists(st.floats(0, 1), min_size=1, max_size=20).filter(any),
    u=st.floats(0, 1, exclude_max=True),
)
def test_draws_stay_in_the_support_and_rise_with_u(weights: list[float], u: float) -> None:
    token = inverse_cdf(weights, u)
    assert weights[token] > 0
    assert inverse_cdf(weights, u / 2) <= token


@pytest.mark.parametrize("bias", [0.0, 0.02])
def test_draws_follow_the_probabilities_and_a_bias_is_caught(bias: float) -> None:
    p = transform(np.log([0.35, 0.25, 0.2, 0.1, 0.07, 0.03]), 0.8, top_k=5, top_p=0.97)
    drawn_from = p + bias * np.array([1, -1, 0, 0, 0, 0])
    uniforms = uniform(11, 0, Purpose.BONUS, np.arange(50_000))
    counts = np.bincount([inverse_cdf(drawn_from, u) for u in uniforms], minlength=len(p))
    p_value = chi_square_p_value(counts, p)
    assert p_value < 1e-4 if bias else p_value > 1e-4
