import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from dspark.training import anchors

masks = hnp.arrays(bool, st.integers(1, 40))


@given(masks)
def test_candidates_have_an_anchor_and_a_label_on_the_mask(mask: np.ndarray) -> None:
    expected = [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]
    assert anchors.candidates(mask).tolist() == expected


@given(masks, st.integers(1, 12), st.integers(0, 5))
def test_sample_is_sorted_without_repeats_and_as_large_as_it_can_be(
    mask: np.ndarray, count: int, seed: int
) -> None:
    sampled = anchors.sample(mask, count, np.random.default_rng(seed)).tolist()
    candidates = anchors.candidates(mask).tolist()
    assert sampled == sorted(set(sampled) & set(candidates))
    assert len(sampled) == min(count, len(candidates))


def test_sample_is_uniform() -> None:
    mask = np.ones(11, dtype=bool)
    rng = np.random.default_rng(0)
    counts = np.bincount(np.concatenate([anchors.sample(mask, 3, rng) for _ in range(4000)]))
    np.testing.assert_allclose(counts / 4000, 0.3, atol=0.03)


@given(masks, st.integers(1, 6))
def test_a_label_counts_if_all_before_it_do(mask: np.ndarray, block_size: int) -> None:
    positions = anchors.candidates(mask)
    counted = anchors.counted_labels(mask, positions, block_size)
    for t, row in zip(positions, counted, strict=True):
        for k in range(1, block_size + 1):
            assert row[k - 1] == (t + k < len(mask) and mask[t + 1 : t + k + 1].all())
