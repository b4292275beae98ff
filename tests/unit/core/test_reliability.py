import numpy as np
import pytest

from dspark.core.reliability import auc, brier, by_position, ece, ece_floor, reliability


class TestReliability:
    def test_bins(self) -> None:
        diagram = reliability([0.0, 0.24, 0.25, 1.0], [0, 1, 1, 0], bins=4)
        assert diagram.count.tolist() == [2, 1, 0, 1]
        assert diagram.predicted.tolist() == [0.12, 0.25, 0.0, 1.0]
        assert diagram.observed.tolist() == [0.5, 1.0, 0.0, 0.0]

    def test_ece_weighs_bins_by_their_count(self) -> None:
        assert ece([0.1, 0.1, 0.9], [0, 0, 0]) == pytest.approx((2 * 0.1 + 0.9) / 3)

    def test_ece_cancels_inside_a_bin_only(self) -> None:
        assert ece([0.5, 0.5], [0, 1]) == 0
        assert ece([0.2, 0.8], [1, 0]) == pytest.approx(0.8)

    def test_no_data_has_no_error(self) -> None:
        assert ece([], []) == 0


def test_brier_is_the_mean_square() -> None:
    assert brier([1.0, 0.5], [0, 1]) == pytest.approx(0.625)
    with pytest.raises(ValueError, match="no predictions"):
        brier([], [])


class TestAuc:
    @pytest.mark.parametrize(
        ("scores", "labels", "area"),
        [
            ([0.1, 0.2, 0.3], [0, 0, 1], 1.0),
            ([0.3, 0.2, 0.1], [0, 0, 1], 0.0),
            ([0.5, 0.5], [0, 1], 0.5),
            ([0.1, 0.5, 0.5, 0.9], [0, 0, 1, 1], 3.5 / 4),
        ],
    )
    def test_share_of_ordered_pairs(
        self, scores: list[float], labels: list[int], area: float
    ) -> None:
        assert auc(scores, labels) == area

    @pytest.mark.parametrize("label", [0, 1])
    def test_one_kind_of_label_is_not_enough(self, label: int) -> None:
        with pytest.raises(ValueError, match="both labels"):
            auc([0.1, 0.2], [label, label])


def test_the_floor_is_what_a_perfect_model_measures() -> None:
    rng = np.random.default_rng(0)
    for count in (700, 20_000):
        p = rng.beta(2, 1, count)
        measured = [ece(p, rng.random(count) < p) for _ in range(50)]
        assert ece_floor(p) == pytest.approx(np.mean(measured), rel=0.1), count
    assert ece_floor([]) == 0


def test_a_position_is_judged_by_the_blocks_that_sent_it() -> None:
    survival = [[0.9, 0.8, 0.5], [0.6, 0.3, 0.2], [0.5, 0.4, 0.1]]
    first, second = by_position(survival, accepted=[2, 0, 1], admitted=[2, 2, 1])
    assert (first.count, second.count) == (3, 2)
    assert first.brier == pytest.approx((0.1**2 + 0.6**2 + 0.5**2) / 3)
    assert first.auc == 0.5
    assert second.brier == pytest.approx((0.2**2 + 0.3**2) / 2)
    assert second.auc == 1.0


def test_an_auc_of_one_kind_of_label_is_left_open() -> None:
    (only,) = by_position([[0.9]], [1], [1])
    assert only.auc is None
    assert by_position(np.zeros((0, 3)), [], []) == ()
