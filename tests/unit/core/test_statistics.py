import math

import numpy as np
import pytest

from dspark.core.statistics import (
    accepted_length,
    chi_square_p_value,
    gain_interval,
    prefix_survival,
    ratio_interval,
    upper_gamma,
    verify_rate,
)

# (accepted, admitted) of four rounds; the last one ended with an accepted EOS and got no bonus
ACCEPTED, ADMITTED, COMMITTED = [3, 0, 1, 2], [3, 3, 2, 2], [4, 1, 2, 2]


def test_accepted_length_pools_rounds() -> None:
    assert accepted_length(COMMITTED) == 9 / 4
    with pytest.raises(ValueError, match="no rounds"):
        accepted_length([])


def test_verify_rate_counts_the_anchors() -> None:
    assert verify_rate(COMMITTED, ADMITTED) == 9 / 14


def test_prefix_survival_is_unconditional() -> None:
    survival = prefix_survival(ACCEPTED, ADMITTED, block_size=4)
    np.testing.assert_array_equal(survival, [3 / 4, 2 / 4, 1 / 2, np.nan])


@pytest.mark.parametrize(
    ("degrees", "statistic", "p"),
    [  # the usual table of critical values
        (1, 3.841, 0.05),
        (2, 5.991, 0.05),
        (10, 18.307, 0.05),
        (30, 50.892, 0.01),
        (100, 149.449, 0.001),
        (5, 1.145, 0.95),
    ],
)
def test_upper_gamma_gives_the_critical_values(degrees: int, statistic: float, p: float) -> None:
    assert upper_gamma(degrees / 2, statistic / 2) == pytest.approx(p, rel=1e-3)


@pytest.mark.parametrize("x", [0.0, 0.3, 1.9, 2.1, 30.0])
def test_upper_gamma_of_whole_and_half_orders(x: float) -> None:
    assert upper_gamma(1.0, x) == pytest.approx(math.exp(-x), rel=1e-12)
    assert upper_gamma(2.0, x) == pytest.approx((1 + x) * math.exp(-x), rel=1e-12)
    assert upper_gamma(0.5, x) == pytest.approx(math.erfc(math.sqrt(x)), rel=1e-12)


class TestChiSquare:
    def test_two_cells(self) -> None:
        """60 of 100 fair coins: the statistic is 4, one degree of freedom."""
        assert chi_square_p_value([60, 40], [0.5, 0.5]) == pytest.approx(0.0455, rel=1e-3)

    def test_a_perfect_fit(self) -> None:
        assert chi_square_p_value([20, 30, 50], [0.2, 0.3, 0.5]) == 1

    def test_rare_outcomes_are_pooled(self) -> None:
        """Thirty cells that expect 1 each are one cell of 30."""
        p = [0.01] * 30 + [0.7]
        pooled = chi_square_p_value([40, 60], [0.3, 0.7])
        assert chi_square_p_value([40] + [0] * 29 + [60], p) == pytest.approx(pooled)

    def test_the_impossible_is_caught(self) -> None:
        assert chi_square_p_value([50, 49, 1], [0.5, 0.5, 0.0]) == 0
        assert chi_square_p_value([50, 50, 0], [0.5, 0.5, 0.0]) == 1

    @pytest.mark.parametrize(("counts", "p"), [([3, 3], [0.5, 0.5]), ([0, 0], [0.5, 0.5])])
    def test_too_few_draws_are_refused(self, counts: list[int], p: list[float]) -> None:
        with pytest.raises(ValueError, match="too few draws"):
            chi_square_p_value(counts, p)

    def test_its_level_is_its_level(self) -> None:
        rng = np.random.default_rng(0)
        p = rng.dirichlet(np.ones(12))
        draws = rng.multinomial(2000, p, size=2000)
        rejected = np.mean([chi_square_p_value(counts, p) < 0.05 for counts in draws])
        assert rejected == pytest.approx(0.05, abs=0.015)


class TestBootstrap:
    def test_interval_has_the_width_of_the_standard_error(self) -> None:
        rng = np.random.default_rng(1)
        values = rng.normal(3.0, 2.0, size=400)
        low, high = ratio_interval(values, np.ones_like(values), rng)
        assert low < values.mean() < high
        assert high - low == pytest.approx(2 * 1.96 * 2.0 / 20, rel=0.15)

    def test_same_generator_state_same_interval(self) -> None:
        intervals = [
            ratio_interval([1, 2, 4], [1, 1, 1], np.random.default_rng(5)) for _ in range(2)
        ]
        assert intervals[0] == intervals[1]

    def test_paired_ratios_share_what_sways_them_both(self) -> None:
        """Hard and easy clusters move both ratios by a third; their ratio stays at 1.1."""
        rng = np.random.default_rng(2)
        level, rounds = rng.uniform(1.0, 3.0, size=200), np.full(200, 50.0)
        noise = rng.normal(0.0, 0.01, size=200)
        own, other = (level * (1.1 + noise) * rounds, rounds), (level * rounds, rounds)
        low, high = gain_interval(own, other, rng)
        assert low < 1.1 < high
        assert high - low < 0.005
        assert gain_interval(own, own, rng) == (1.0, 1.0)

    def test_unequal_pairs_are_refused(self) -> None:
        with pytest.raises(ValueError, match="same shape"):
            gain_interval(([1, 2], [1, 1]), ([1], [1]), np.random.default_rng(0))

    def test_no_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="no values"):
            ratio_interval([], [], np.random.default_rng(0))
