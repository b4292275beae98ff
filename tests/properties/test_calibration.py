"""Sequential temperature scaling undoes a distortion, from complete and from censored data."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.core.calibration import apply, fit_sts
from dspark.core.reliability import auc, ece
from dspark.core.types import Scaling

GAMMA = 4


@pytest.mark.parametrize("censored", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_error_falls_and_the_distortion_is_found(seed: int, censored: bool) -> None:
    rng = np.random.default_rng(seed)
    distortion = np.array([0.5, 2.0, 0.4, 1.5])
    honest = rng.normal(1.0, 1.5, size=(30_000, GAMMA))
    kept = rng.random(honest.shape) < apply(honest, Scaling.none(GAMMA))
    accepted = np.cumprod(kept, axis=1).sum(axis=1)
    admitted = np.full(len(honest), GAMMA)
    logits = honest / distortion
    if censored:  # as a planner would: by the scores it sees
        admitted = (np.cumprod(apply(logits, Scaling.none(GAMMA)), axis=1) > 0.3).sum(axis=1)
    accepted = np.minimum(accepted, admitted)

    scaling = fit_sts(logits, accepted, admitted)
    raw = np.cumprod(apply(logits, Scaling.none(GAMMA)), axis=1)
    scaled = np.cumprod(apply(logits, scaling), axis=1)
    for j in range(GAMMA):
        seen, label = admitted > j, accepted > j
        assert ece(scaled[seen, j], label[seen]) < 0.02
        assert ece(scaled[seen, j], label[seen]) < ece(raw[seen, j], label[seen])
    np.testing.assert_allclose(scaling.temperatures[:2], 1 / distortion[:2], rtol=0.15)
    np.testing.assert_allclose(scaling.intercepts[:2], 0, atol=0.15)


@given(
    scores=st.lists(st.integers(0, 3), min_size=2, max_size=12),
    data=st.data(),
)
def test_auc_counts_ordered_pairs(scores: list[int], data: st.DataObject) -> None:
    labels = data.draw(
        st.lists(st.booleans(), min_size=len(scores), max_size=len(scores)).filter(
            lambda drawn: 0 < sum(drawn) < len(drawn)
        )
    )
    pairs = [
        (a > b) + (a == b) / 2
        for a, positive in zip(scores, labels, strict=True)
        for b, other in zip(scores, labels, strict=True)
        if positive and not other
    ]
    assert auc(scores, labels) == pytest.approx(sum(pairs) / len(pairs))
