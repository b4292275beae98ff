import numpy as np
import pytest

from dspark.engine.history import History


def test_the_last_blocks_are_kept() -> None:
    history = History(block_size=2, window=3)
    assert len(history) == 0
    for first in (0.1, 0.2, 0.3, 0.4):
        history.record(np.array([first, 0.0]), admitted=0, accepted=0)
    assert len(history) == 3
    assert sorted(history.scores().survival[:, 0]) == pytest.approx([0.2, 0.3, 0.4])


def test_promises_are_corrected_by_what_came_true() -> None:
    boaster, modest, honest = (History(block_size=2, window=16) for _ in range(3))
    for i in range(400):
        boaster.record(np.array([0.8, 0.8]), admitted=2, accepted=i % 2)  # 1.6 promised, 0.5 kept
        modest.record(np.array([0.4, 0.4]), admitted=2, accepted=2)
        honest.record(np.array([0.5, 0.0]), admitted=1, accepted=i % 2)
    assert boaster.realism == pytest.approx(0.5 / 1.6, abs=0.05)
    assert honest.realism == pytest.approx(1.0, abs=0.1)
    assert modest.realism > 2
    assert np.all(modest.scores().survival <= 1.0)


def test_what_was_trimmed_says_nothing_about_the_drafter() -> None:
    history = History(block_size=2)
    for _ in range(100):
        history.record(np.array([0.9, 0.9]), admitted=0, accepted=0)
    assert history.realism == 1.0
