import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.core.acceptance import greedy, rejection, residual
from dspark.core.rng import Purpose

P = np.array([[0.5, 0.5, 0.0], [0.2, 0.0, 0.8], [0.1, 0.1, 0.8]])
Q = np.array([[0.8, 0.1, 0.1], [0.4, 0.4, 0.2]])


@pytest.mark.parametrize(
    ("draft", "argmax", "verdict"),
    [
        ([], [4], (0, 4)),
        ([4], [4, 5], (1, 5)),
        ([4, 6, 7], [4, 5, 7, 8], (1, 5)),
        ([4, 5, 7], [4, 5, 7, 8], (3, 8)),
        ([9, 5], [4, 5, 7], (0, 4)),
    ],
)
def test_greedy_keeps_what_the_target_would_say(
    draft: list[int], argmax: list[int], verdict: tuple[int, int]
) -> None:
    assert greedy(draft, argmax) == verdict


def judge(draft: list[int], uniforms: dict[tuple[Purpose, int], float]) -> tuple[int, int]:
    """The verdict on `draft`; a uniform that is not named may not be read."""

    def q_row(k: int) -> NDArray[np.float64]:
        return Q[k]

    q_of_draft = [Q[k, token] for k, token in enumerate(draft)]
    return rejection(draft, P, q_of_draft, q_row, lambda *key: uniforms.pop(key))


def test_no_draft_draws_from_the_target() -> None:
    assert judge([], {(Purpose.BONUS, 0): 0.6}) == (0, 1)


def test_everything_kept_draws_a_bonus() -> None:
    uniforms = {(Purpose.ACCEPT, 0): 0.6, (Purpose.ACCEPT, 1): 0.99, (Purpose.BONUS, 2): 0.15}
    assert judge([0, 2], uniforms) == (2, 1)
    assert not uniforms


def test_a_rejection_draws_from_the_residual() -> None:
    uniforms = {(Purpose.ACCEPT, 0): 0.626, (Purpose.RESIDUAL, 0): 0.01}  # p / q = 0.625
    assert judge([0, 2], uniforms) == (0, 1)


def test_a_token_the_target_excludes_is_never_kept() -> None:
    uniforms = {(Purpose.ACCEPT, 0): 0.0, (Purpose.RESIDUAL, 0): 0.0}
    assert judge([2], uniforms) == (0, 1)


def test_residual_is_the_excess_of_the_target() -> None:
    np.testing.assert_allclose(residual(P[0], Q[0]), [0, 0.4, 0], atol=1e-15)


def test_residual_without_mass_is_the_target() -> None:
    np.testing.assert_array_equal(residual(P[0], P[0] + 1e-12), P[0])
