import numpy as np

from dspark.core.calibration import apply, fit_sts
from dspark.core.reliability import brier


def test_apply_divides_by_the_position_s_temperature() -> None:
    odds = np.log([3.0, 1.0, 9.0])
    np.testing.assert_allclose(apply(odds, [1.0, 1.0, 2.0, 5.0]), [0.75, 0.5, 0.75])


def test_apply_survives_extreme_logits() -> None:
    np.testing.assert_array_equal(apply([[-1e4, 1e4]], [0.1, 0.1]), [[0.0, 1.0]])


class TestFit:
    logits = np.tile(np.log([[4.0, 4.0]]), (1000, 1))  # says 0.8 everywhere

    def test_positions_with_too_little_data_keep_their_confidences(self) -> None:
        temperatures = fit_sts(
            self.logits, np.zeros(1000), np.r_[np.full(10, 2), np.ones(990)], min_count=100
        )
        assert temperatures[0] != 1
        assert temperatures[1] == 1

    def test_a_calibrated_head_is_left_alone(self) -> None:
        accepted = np.repeat([0, 1, 2], [200, 160, 640])
        assert fit_sts(self.logits, accepted, np.full(1000, 2)).tolist() == [1.0, 1.0]

    def test_what_was_not_verified_is_not_a_failure(self) -> None:
        """800 of 1000 pass position 1; of the 500 that admitted a second token, 320 keep both."""
        admitted = np.repeat([1, 2], 500)
        accepted = np.concatenate(
            [np.repeat([0, 1], [100, 400]), np.repeat([0, 1, 2], [100, 80, 320])]
        )
        assert fit_sts(self.logits, accepted, admitted).tolist() == [1.0, 1.0]

    def test_ties_go_to_the_temperature_nearest_to_one(self) -> None:
        even = np.zeros((400, 1))  # the temperature of a zero logit changes nothing
        assert fit_sts(even, np.zeros(400), np.ones(400), grid=[0.5, 1.1, 3.0])[0] == 1.1


def test_a_fit_does_not_flatten_what_tells_blocks_apart() -> None:
    rng = np.random.default_rng(3)
    # Biased upwards, which no temperature can mend: flattening would bring the mean nearer.
    logits = rng.normal(0, 2, (4000, 1))
    accepted = (rng.random(4000) < 1 / (1 + np.exp(-(logits[:, 0] - 1.5)))).astype(int)
    (temperature,) = fit_sts(logits, accepted, np.ones(4000, int))
    raw, fitted = (apply(logits, [t])[:, 0] for t in (1.0, temperature))
    assert brier(fitted, accepted) <= brier(raw, accepted)
    flat = apply(logits, [8.0])[:, 0]
    assert brier(flat, accepted) > brier(raw, accepted)
