import numpy as np
import pytest

from dspark.core.sampling import cut_threshold, inverse_cdf, transform

LOGITS = np.log([0.4, 0.3, 0.2, 0.1])


def test_temperature_one_is_softmax() -> None:
    np.testing.assert_allclose(transform(LOGITS, 1.0), [0.4, 0.3, 0.2, 0.1], rtol=1e-14)


def test_temperature_divides_the_logits() -> None:
    squares = np.array([0.16, 0.09, 0.04, 0.01])
    np.testing.assert_allclose(transform(LOGITS, 0.5), squares / squares.sum(), rtol=1e-14)


def test_large_logits_do_not_overflow() -> None:
    np.testing.assert_array_equal(transform([1e4, 0.0], 0.1), [1.0, 0.0])


def test_top_k_keeps_the_k_likeliest() -> None:
    np.testing.assert_allclose(transform(LOGITS, 1.0, top_k=2), [4 / 7, 3 / 7, 0, 0])


def test_top_k_keeps_ties_with_the_kth() -> None:
    np.testing.assert_allclose(transform([2.0, 1.0, 1.0, 0.0], 1.0, top_k=2)[3], 0)
    assert np.count_nonzero(transform([2.0, 1.0, 1.0, 0.0], 1.0, top_k=2)) == 3


def test_top_k_beyond_the_vocabulary_is_off() -> None:
    np.testing.assert_array_equal(transform(LOGITS, 1.0, top_k=9), transform(LOGITS, 1.0))


@pytest.mark.parametrize(("top_p", "kept"), [(0.01, 1), (0.39, 1), (0.41, 2), (0.69, 2), (0.95, 4)])
def test_top_p_keeps_the_smallest_sufficient_set(top_p: float, kept: int) -> None:
    assert np.count_nonzero(transform(LOGITS, 1.0, top_p=top_p)) == kept


def test_top_p_counts_what_top_k_left() -> None:
    """0.4 of 0.7 is 0.57: enough for p = 0.5 after top-k 2, not enough on its own."""
    assert np.count_nonzero(transform(LOGITS, 1.0, top_p=0.5)) == 2
    assert np.count_nonzero(transform(LOGITS, 1.0, top_k=2, top_p=0.5)) == 1


def test_top_p_is_a_share_of_a_mass_that_rounding_left_below_one() -> None:
    p = transform(np.arange(26) / -7, 1.0, top_p=np.nextafter(1.0, 0.0))
    assert np.count_nonzero(p) == 26


def test_rows_are_independent() -> None:
    rows = np.stack([LOGITS, LOGITS[::-1]])
    both = transform(rows, 0.7, 3, 0.8)
    np.testing.assert_array_equal(both[1], transform(LOGITS[::-1], 0.7, 3, 0.8))


def test_the_threshold_lies_midway_after_temperature() -> None:
    assert cut_threshold([4.0, 2.0, 1.0], 2.0, top_k=1) == 1.5
    np.testing.assert_array_equal(
        cut_threshold([[4.0, 2.0, 1.0], [0.0, 9.0, 9.0]], 1.0, top_k=2), [1.5, 4.5]
    )


def test_no_cut_has_no_threshold() -> None:
    assert cut_threshold(LOGITS, 1.0) == -np.inf


def test_a_threshold_between_neighbouring_floats_keeps_the_upper_one() -> None:
    upper = 1.0
    lower = np.nextafter(upper, 0.0)
    assert cut_threshold([upper, lower], 1.0, top_k=1) == upper


def test_inverse_cdf_walks_the_cells() -> None:
    weights = [0.0, 1.0, 0.0, 3.0, 0.0]
    assert [inverse_cdf(weights, u) for u in (0.0, 0.249, 0.25, 0.999)] == [1, 1, 3, 3]


def test_inverse_cdf_never_leaves_the_support() -> None:
    tiny = 5e-324  # u * total rounds to the total
    assert inverse_cdf([0.0, tiny, 0.0], 1 - 2**-53) == 1


@pytest.mark.parametrize("weights", [[0.0, 0.0], [np.nan, 1.0], [np.inf, 1.0]])
def test_unusable_weights_are_refused(weights: list[float]) -> None:
    with pytest.raises(ValueError, match="cannot draw"):
        inverse_cdf(weights, 0.5)


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(0.0, 0, 1.0), (-1.0, 0, 1.0), (np.nan, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 0.0), (1.0, 0, 1.1)],
)
def test_settings_out_of_range_are_refused(temperature: float, top_k: int, top_p: float) -> None:
    with pytest.raises(ValueError, match="must be"):
        transform(LOGITS, temperature, top_k, top_p)
