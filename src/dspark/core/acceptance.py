"""How much of a draft the target keeps, and the token it puts behind it: the fp64 reference.

In `rejection` mode the committed tokens have exactly the target's law, whatever the drafter
proposes (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
decoding", 2023).
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dspark.core.rng import Purpose
from dspark.core.sampling import inverse_cdf

# Below this mass (p - q)+ holds rounding noise only. The fallback, p, is then the same law, since
# p and q agree; how often it is reached is bounded by the same mass.
MIN_RESIDUAL_MASS = 1e-8


def greedy(draft: ArrayLike, argmax: ArrayLike) -> tuple[int, int]:
    """(accepted, next token) for `draft` [l], given the target's argmax [l + 1] behind the anchor
    and behind each draft token."""
    drafted, best = np.asarray(draft), np.asarray(argmax)
    kept = np.append(drafted == best[: len(drafted)], False)
    accepted = int(kept.argmin())
    return accepted, int(best[accepted])


def rejection(
    draft: Sequence[int],
    p: ArrayLike,
    q_of_draft: ArrayLike,
    q_row: Callable[[int], NDArray[np.floating]],
    uniform: Callable[[Purpose, int], float],
) -> tuple[int, int]:
    """(accepted, next token) for `draft` [l].

    `p` [l + 1, V] is the target's distribution behind the anchor and each draft token, `q_of_draft`
    [l] the probability with which each token was drafted, `q_row(k)` the whole distribution [V]
    token k was drawn from (asked for once, at the first rejection), `uniform(purpose, index)` a
    fresh uniform: ACCEPT k, then RESIDUAL k or BONUS l.
    """
    p, q_of_draft = np.asarray(p, np.float64), np.asarray(q_of_draft, np.float64)
    for k, token in enumerate(draft):
        if uniform(Purpose.ACCEPT, k) * q_of_draft[k] >= p[k, token]:  # u >= p / q
            return k, inverse_cdf(residual(p[k], q_row(k)), uniform(Purpose.RESIDUAL, k))
    return len(draft), inverse_cdf(p[len(draft)], uniform(Purpose.BONUS, len(draft)))


def residual(p: NDArray[np.floating], q: NDArray[np.floating]) -> NDArray[np.float64]:
    """What a rejected token is replaced from, [V], not normalised: (p - q)+, or p if that has no
    mass to speak of."""
    excess = np.maximum(np.asarray(p, np.float64) - q, 0.0)
    return excess if excess.sum() > MIN_RESIDUAL_MASS else np.asarray(p, np.float64)
