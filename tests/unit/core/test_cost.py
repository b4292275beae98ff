import json
from dataclasses import replace

import numpy as np
import pytest

from dspark.core.cost import Curve, ProfileKey, StepCost
from dspark.core.errors import ConfigError
from dspark.core.types import ProfileShape

KEY = ProfileKey("target", "drafter", "cpu", "fp32", threads=2)
COST = StepCost(
    tokens=Curve((1, 8, 64), (0.020, 0.030, 0.100)),
    draft=Curve((1, 16), (0.004, 0.010)),
    head_row_seconds=1e-4,
    context_token_seconds=1e-6,
    overhead_seconds=0.001,
)
TIERED = replace(COST, tokens=replace(COST.tokens, tiered=True))


class TestCurve:
    curve = Curve((2, 4, 8), (1.0, 2.0, 2.0))

    def test_is_linear_between_its_points_and_constant_below(self) -> None:
        np.testing.assert_array_equal(self.curve(np.array([0, 2, 3, 6])), [1.0, 1.0, 1.5, 2.0])

    def test_a_flat_end_goes_on_with_the_mean_slope(self) -> None:
        assert self.curve(14) == 2.0 + 6 * (1.0 / 6)

    def test_a_steep_end_goes_on_with_its_own_slope(self) -> None:
        assert Curve((2, 4, 8), (1.0, 1.0, 3.0))(10) == 4.0

    def test_between_is_the_same_looked_up(self) -> None:
        for curve in (self.curve, replace(self.curve, tiered=True)):
            for start, stop in ((0, 1), (3, 9), (7, 40)):
                np.testing.assert_array_equal(
                    curve.between(start, stop), curve(np.arange(start, stop))
                )
        with pytest.raises(ValueError, match="read-only"):
            self.curve.between(0, 2)[0] = 9.0

    def test_tiers_round_up(self) -> None:
        tiers = Curve((2, 4, 8), (1.0, 2.0, 4.0), tiered=True)
        counts = np.array([0, 2, 3, 4, 5, 8, 10])
        np.testing.assert_array_equal(tiers(counts), [1, 1, 2, 2, 4, 4, 4 + 2 * 0.5])
        assert tiers(3) == 2.0

    def test_through_averages_equal_counts_and_never_falls(self) -> None:
        curve = Curve.through([(8, 1.5), (1, 1.0), (1, 3.0), (4, 2.5)])
        assert curve == Curve((1, 4, 8), (2.0, 2.5, 2.5))

    def test_through_keeps_seconds_positive(self) -> None:
        assert Curve.through([(1, -1.0), (2, 1.0)]).seconds[0] > 0

    @pytest.mark.parametrize(
        ("counts", "seconds", "reason"),
        [
            ((1,), (1.0,), "at least two sizes"),
            ((1, 2), (1.0,), "at least two sizes"),
            ((2, 2), (1.0, 1.0), "must rise"),
            ((-1, 2), (1.0, 1.0), "must rise"),
            ((1, 2), (1.0, float("nan")), "finite"),
            ((1, 2), (-1.0, 1.0), "not negative"),
            ((1, 2), (2.0, 1.0), "must not fall"),
        ],
    )
    def test_bad_data_is_refused(
        self, counts: tuple[int, ...], seconds: tuple[float, ...], reason: str
    ) -> None:
        with pytest.raises(ConfigError, match=reason):
            Curve(counts, seconds)

    def test_no_points_are_refused(self) -> None:
        with pytest.raises(ConfigError, match="at least two sizes"):
            Curve.through([])


class TestStepCost:
    def test_a_step_adds_up(self) -> None:
        assert COST.verify_seconds(8, 4, 1000) == pytest.approx(0.030 + 4e-4 + 1e-3)
        assert COST.draft_seconds(16) == 0.010

    def test_counts_broadcast(self) -> None:
        seconds = COST.verify_seconds(np.arange(1, 100), 1 + np.arange(99), 10)
        assert seconds.shape == (99,)
        assert np.all(np.diff(seconds) > 0)

    def test_more_rows_are_the_same_step_by_step(self) -> None:
        more = np.arange(200)
        np.testing.assert_array_equal(
            COST.verify_seconds_of_more(7, 3, 1000, 199),
            COST.verify_seconds(7 + more, 3 + more, 1000),
        )

    def test_nothing_to_draft_costs_nothing(self) -> None:
        assert COST.draft_seconds(0) == 0.0
        assert replace(COST, draft=None).draft_seconds(4) == 0.0

    @pytest.mark.parametrize("value", [-1e-3, float("inf"), float("nan")])
    def test_impossible_terms_are_refused(self, value: float) -> None:
        with pytest.raises(ConfigError, match="overhead_seconds must be finite"):
            replace(COST, overhead_seconds=value)


def timed(*sizes: tuple[int, int, int, int]) -> list[tuple[ProfileShape, float]]:
    """Shapes (B, H, R, context per request) with the time COST gives them."""
    return [
        (ProfileShape(b, h, r, context), float(COST.verify_seconds(b, h, r * context)))
        for b, h, r, context in sizes
    ]


class TestProfile:
    def test_the_surface_behind_the_timings_is_found(self) -> None:
        verify = timed((1, 1, 1, 256), (8, 8, 4, 0), (8, 2, 4, 0), (8, 8, 4, 512), (64, 64, 8, 64))
        fitted = StepCost.from_profile(verify, [(1, 0.004), (16, 0.010)], 0.001)
        assert fitted.head_row_seconds == pytest.approx(COST.head_row_seconds)
        assert fitted.context_token_seconds == pytest.approx(COST.context_token_seconds)
        assert fitted.tokens.counts == COST.tokens.counts
        assert fitted.tokens.seconds == pytest.approx(COST.tokens.seconds)
        assert (fitted.draft, fitted.overhead_seconds) == (COST.draft, 0.001)

    def test_what_was_not_varied_stays_in_the_curve(self) -> None:
        verify = timed((1, 1, 1, 100), (8, 8, 1, 100))
        fitted = StepCost.from_profile(verify)
        assert (fitted.head_row_seconds, fitted.context_token_seconds) == (0, 0)
        assert fitted.tokens.seconds == pytest.approx([seconds for _, seconds in verify])
        assert fitted.draft is None

    def test_a_slope_that_noise_made_negative_is_none(self) -> None:
        shapes = [(1, 1), (8, 2), (8, 8)]
        verify = [
            (ProfileShape(b, h, 1, 0), s) for (b, h), s in zip(shapes, (1, 3, 2), strict=True)
        ]
        assert StepCost.from_profile(verify).head_row_seconds == 0
        assert StepCost.from_profile(verify).tokens.seconds == (1.0, 2.5)

    @pytest.mark.parametrize(
        "verify",
        [[], timed((8, 1, 1, 0)), [*timed((1, 1, 1, 0)), (ProfileShape(8, 1, 1, 0), float("nan"))]],
    )
    def test_too_little_or_bad_data_is_refused(
        self, verify: list[tuple[ProfileShape, float]]
    ) -> None:
        with pytest.raises(ConfigError, match="profile"):
            StepCost.from_profile(verify)


class TestStorage:
    @pytest.mark.parametrize("cost", [COST, replace(COST, draft=None), TIERED])
    def test_round_trip(self, cost: StepCost) -> None:
        assert StepCost.from_json(cost.to_json(KEY), KEY) == cost

    def test_another_key_is_refused_by_name(self) -> None:
        other = replace(KEY, precision="bf16", threads=8)
        with pytest.raises(ConfigError, match="another precision, threads: profile again"):
            StepCost.from_json(COST.to_json(KEY), other)

    def test_the_digest_tells_keys_apart(self) -> None:
        assert KEY.digest() == replace(KEY).digest()
        assert KEY.digest() != replace(KEY, threads=4).digest()

    @pytest.mark.parametrize(
        "damage",
        [
            lambda stored: "no json",
            lambda stored: "[]",
            lambda stored: json.dumps(stored | {"cost": {}}),
            lambda stored: json.dumps(stored | {"key": {"threads": 2}}),
            lambda stored: json.dumps(stored | {"cost": stored["cost"] | {"unknown": 1}}),
            lambda stored: json.dumps(stored | {"cost": stored["cost"] | {"tokens": None}}),
        ],
    )
    def test_a_damaged_file_is_refused(self, damage) -> None:
        text = damage(json.loads(COST.to_json(KEY)))
        with pytest.raises(ConfigError, match="cannot be read"):
            StepCost.from_json(text, KEY)
