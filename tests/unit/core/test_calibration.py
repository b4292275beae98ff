import numpy as np

from dspark.core.calibration import apply, fit_sts
from dspark.core.reliability import brier
from dspark.core.types import Scaling


def test_every_position_has_its_own_temperature_and_intercept() -> None:
    odds = np.log([3.0, 1.0, 9.0])
    scaling = Scaling((1.0, 1.0, 2.0, 5.0), (0.0, float(np.log(4.0)), 0.0, 1.0))
    np.testing.assert_allclose(apply(odds, scaling), [0.75, 0.8, 0.75])


def test_apply_survives_extreme_logits() -> None:
    np.testing.assert_array_equal(
        apply([[-1e4, 1e4]], Scaling((0.1, 0.1), (0.0, 0.0))), [[0.0, 1.0]]
    )


class TestFit:
    logits = np.tile(np.log([[4.0, 4.0]]), (1000, 1))  # says 0.8 everywhere

    def test_positions_with_too_little_data_keep_their_confidences(self) -> None:
        fitted = fit_sts(
            self.logits, np.zeros(1000), np.r_[np.full(10, 2), np.ones(990)], min_count=100
        )
        assert fitted.intercepts[0] < -1
        assert (fitted.temperatures[1], fitted.intercepts[1]) == (1, 0)

    def test_a_calibrated_head_is_left_alone(self) -> None:
        accepted = np.repeat([0, 1, 2], [200, 160, 640])
        self.assert_as_it_is(fit_sts(self.logits, accepted, np.full(1000, 2)))

    def test_what_was_not_verified_is_not_a_failure(self) -> None:
        """800 of 1000 pass position 1; of the 500 that admitted a second token, 320 keep both."""
        admitted = np.repeat([1, 2], 500)
        accepted = np.concatenate(
            [np.repeat([0, 1], [100, 400]), np.repeat([0, 1, 2], [100, 80, 320])]
        )
        self.assert_as_it_is(fit_sts(self.logits, accepted, admitted))

    def test_ties_go_to_the_temperature_nearest_to_one(self) -> None:
        even = np.zeros((400, 1))  # the temperature of a zero logit changes nothing
        fitted = fit_sts(even, np.zeros(400), np.ones(400), grid=[0.5, 1.1, 3.0])
        assert fitted.temperatures == (1.1,)

    def assert_as_it_is(self, fitted: Scaling) -> None:
        assert fitted.temperatures == (1, 1)
        np.testing.assert_allclose(fitted.intercepts, 0, atol=2e-3)


def test_a_mean_that_no_temperature_can_move_is_put_right() -> None:
    rng = np.random.default_rng(3)
    honest = rng.normal(0, 2, (20_000, 1))
    accepted = (rng.random(20_000) < 1 / (1 + np.exp(-honest[:, 0]))).astype(int)
    fitted = fit_sts(2 * honest + 1, accepted, np.ones(20_000, int))
    np.testing.assert_allclose(fitted.temperatures, 2, rtol=0.1)
    np.testing.assert_allclose(fitted.intercepts, -0.5, atol=0.1)


def test_a_fit_does_not_flatten_what_tells_blocks_apart() -> None:
    rng = np.random.default_rng(3)
    # Of no fixed relation to the outcome beyond its sign: one mean for all has the least error.
    logits = rng.normal(0, 2, (4000, 1))
    accepted = (rng.random(4000) < np.where(logits[:, 0] > 0, 0.7, 0.3)).astype(int)
    scaling = fit_sts(logits, accepted, np.ones(4000, int))
    raw, fitted, flat = (
        apply(logits, own)[:, 0] for own in (Scaling.none(1), scaling, Scaling((8.0,), (0.0,)))
    )
    assert brier(fitted, accepted) <= brier(raw, accepted)
    assert fitted.std() > 2 * flat.std()
