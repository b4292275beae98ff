"""The virtual drafter's luck has the law that its profile states."""

import numpy as np
import pytest

from dspark.core.calibration import apply
from dspark.core.reliability import auc, ece
from dspark.core.types import Scaling
from dspark.sim.script import RIGHT, draw_blocks, draw_script
from tests.support.workloads import EASY, domain, workload

POSITIONS = 40_000


def test_tokens_are_right_as_often_as_the_profile_says() -> None:
    right = draw_blocks(domain(), POSITIONS, np.random.default_rng(1)).tokens == RIGHT
    alive = np.ones(POSITIONS, bool)
    for k, expected in enumerate(EASY):  # given that those before it were right
        assert right[alive, k].mean() == pytest.approx(expected, abs=0.01)
        alive &= right[:, k]


@pytest.mark.parametrize("wanted", [0.5, 0.65, 0.8, 0.95])
def test_confidences_are_calibrated_and_rank_as_well_as_stated(wanted: float) -> None:
    blocks = draw_blocks(domain(auc=wanted), POSITIONS, np.random.default_rng(2))
    confidences = apply(blocks.confidence_logits, Scaling.none(4))
    for k in range(4):
        right = blocks.tokens[:, k] == RIGHT
        assert ece(confidences[:, k], right) < 0.01
        assert auc(confidences[:, k], right) == pytest.approx(wanted, abs=0.02)


def test_a_drafter_can_promise_too_much() -> None:
    honest, boasting = (
        draw_blocks(domain(**changes), 100, np.random.default_rng(3))
        for changes in ({}, {"logit_scale": 2.0, "logit_bias": 1.0})
    )
    np.testing.assert_array_equal(honest.tokens, boasting.tokens)
    np.testing.assert_allclose(
        boasting.confidence_logits, 2 * honest.confidence_logits + 1, rtol=1e-5, atol=1e-5
    )


def test_a_request_depends_on_workload_seed_and_number_only() -> None:
    mixed = workload(domain("a"), domain("b"))
    first, again, other = (draw_script(mixed, seed, 5) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.blocks.confidence_logits, again.blocks.confidence_logits)
    assert not np.array_equal(first.blocks.confidence_logits, other.blocks.confidence_logits)


def test_domains_come_by_their_shares() -> None:
    mixed = workload(domain("a", share=3), domain("b", share=1))
    names = [draw_script(mixed, 0, index).domain.name for index in range(2000)]
    assert names.count("a") / len(names) == pytest.approx(0.75, abs=0.03)
