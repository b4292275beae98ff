import numpy as np
import pytest

from dspark.core.rng import Purpose, uniform

GOLDEN = [
    0.1296456182997474,
    0.8847898165349132,
    0.8193382636014529,
    0.16526896395580137,
    0.5635002754348054,
]
GOLDEN_PURPOSES = [0.1296456182997474, 0.8513026201288322, 0.8905966070102489, 0.21095320371927717]


def test_values_never_change() -> None:
    """Golden: another value here means other texts for the same nonce. Do not update lightly."""
    keys = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (2**64 - 1, 12345, 7)]
    assert [uniform(nonce, step, Purpose.DRAFT, index) for nonce, step, index in keys] == GOLDEN
    assert [uniform(0, 0, purpose, 0) for purpose in Purpose] == GOLDEN_PURPOSES


def test_purposes_keep_their_numbers() -> None:
    assert {p.name: p.value for p in Purpose} == {
        "DRAFT": 0,
        "ACCEPT": 1,
        "RESIDUAL": 2,
        "BONUS": 3,
    }


def test_arguments_broadcast() -> None:
    nonces = np.array([[1], [2], [3]])
    values = uniform(nonces, 5, Purpose.ACCEPT, np.arange(4))
    assert values.shape == (3, 4)
    assert values[2, 1] == uniform(3, 5, Purpose.ACCEPT, 1)


def test_numpy_integers_are_integers() -> None:
    assert uniform(1, 2, Purpose.DRAFT, np.int64(3)) == uniform(1, 2, Purpose.DRAFT, 3)


@pytest.mark.parametrize("nonce", [-1, 2**64])
def test_a_key_outside_64_bits_is_refused(nonce: int) -> None:
    with pytest.raises(OverflowError, match="64 unsigned bits"):
        uniform(nonce, 0, Purpose.DRAFT, 0)
