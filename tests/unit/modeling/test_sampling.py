import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dspark.core import sampling as reference
from dspark.core.types import SamplingParams
from dspark.modeling import sampling
from dspark.modeling.sampling import argmax, draw, probabilities


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from([5, 40, 3000]),
    rows=st.lists(
        st.tuples(
            st.sampled_from([0.3, 0.7, 1.0, 2.5]),
            st.sampled_from([0, 1, 3, 20, 10_000]),
            st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 1000),
)
@example(vocab=3000, rows=[(0.3, 0, 0.05), (1.0, 0, 0.999)], seed=442)  # a cut 1e-6 from a token
def test_mixed_transforms_equal_the_reference(vocab, rows, seed) -> None:
    logits = random_logits(len(rows), vocab, seed)
    params = [SamplingParams(temperature=t, top_k=k, top_p=p) for t, k, p in rows]
    p, cut = probabilities(logits, params)
    for row, (t, k, top_p) in enumerate(rows):
        values, mine = logits[row].numpy(), p[row].numpy()
        np.testing.assert_allclose(mine, reference.transform(values, t, k, top_p), atol=1e-5)
        # fp32 places the edge of top-p to within 1e-5 of mass: tokens there may go either way.
        slack = 0.0 if top_p == 1 else 1e-5
        least = reference.transform(values, t, k, top_p - slack) > 0
        most = reference.transform(values, t, k, top_p + slack) > 0
        assert not (least & (mine == 0)).any()
        assert not (~most & (mine > 0)).any()
        if (least == most).all():
            expected = reference.cut_threshold(values, t, k, top_p)
            np.testing.assert_allclose(cut[row].item(), expected, rtol=1e-5, atol=1e-5)


def test_a_flat_row_is_cut_beyond_the_first_look() -> None:
    """Top-p over near-equal logits keeps more tokens than the nucleus search looks at first."""
    vocab = 4 * sampling._NUCLEUS_WIDTH
    flat = torch.linspace(0, 1e-3, vocab)[None]
    peaked = random_logits(1, vocab, 3) * 3
    params = [SamplingParams(top_p=0.9), SamplingParams(top_p=0.9)]
    p, _ = probabilities(torch.cat((flat, peaked)), params)
    kept = (p > 0).sum(-1)
    assert kept[0] == pytest.approx(0.9 * vocab, abs=3)
    assert kept[1] < sampling._NUCLEUS_WIDTH


def test_ties_with_the_last_kept_token_stay() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    p, cut = probabilities(logits, [SamplingParams(top_k=2)])
    assert (p[0] > 0).tolist() == [False, True, True, True, True, False]
    assert cut.item() == 1.5


def test_a_given_cut_reproduces_the_set_of_a_noisy_row() -> None:
    logits = random_logits(4, 300, 9)
    params = [SamplingParams(temperature=0.7, top_k=20, top_p=0.8)] * 4
    p, cut = probabilities(logits, params)
    again, _ = probabilities(logits + 1e-5 * torch.randn_like(logits), params, cut)
    assert torch.equal(p > 0, again > 0)


def test_argmax_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, 1000)
    logits[0, [7, 900]] = 5.0
    assert argmax(logits).tolist() == [7, 0]


@pytest.mark.parametrize("vocab", [3, 256, 1000])
def test_draw_equals_the_reference_inverse_cdf(vocab: int) -> None:
    weights = torch.softmax(random_logits(200, vocab, vocab), -1) * 0.37
    weights[:, ::3] = 0
    u = np.random.default_rng(1).random(200)
    u[:2] = 0.0, 1 - 2.0**-53
    tokens = draw(weights, u)
    assert (weights[torch.arange(200), torch.from_numpy(tokens)] > 0).all()
    expected = [reference.inverse_cdf(w.numpy(), x) for w, x in zip(weights, u, strict=True)]
    assert tokens.tolist() == expected
