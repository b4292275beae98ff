from itertools import pairwise

import pytest

from dspark.engine.pace import FEWEST, PLAIN_EVERY, RETRY_AFTER, Pace


def fed(plain: int, drafted: int, *, requests: int = 16, drafted_seconds: float = 0.3) -> Pace:
    """Plain steps commit 16 tokens in 0.2 s, drafting ones 20."""
    pace = Pace()
    for _ in range(plain):
        pace.record(drafted=False, requests=requests, tokens=16, seconds=0.2)
    for _ in range(drafted):
        pace.record(drafted=True, requests=requests, tokens=20, seconds=drafted_seconds)
    return pace


def test_the_gain_is_measured_tokens_per_second_over_plain_ones() -> None:
    assert fed(FEWEST, FEWEST).gain(16) == pytest.approx((20 / 0.3) / (16 / 0.2) - 1)
    assert fed(FEWEST, FEWEST, drafted_seconds=0.2).gain(16) == pytest.approx(0.25)


def test_a_few_steps_are_no_measurement() -> None:
    assert fed(FEWEST - 1, FEWEST).gain(16) is None
    assert fed(FEWEST, FEWEST - 1).gain(16) is None


def test_a_step_that_was_held_up_does_not_decide() -> None:
    pace = fed(FEWEST, FEWEST)
    before = pace.gain(16)
    pace.record(drafted=False, requests=16, tokens=16, seconds=60.0)
    assert pace.gain(16) == pytest.approx(before)


def test_loads_are_told_apart_but_neighbours_are_one() -> None:
    pace = fed(FEWEST, FEWEST)
    assert pace.gain(15) == pace.gain(17) == pace.gain(16)
    assert pace.gain(8) is None
    assert pace.gain(32) is None


def test_plain_steps_come_soon_at_first_and_then_seldom() -> None:
    pace, plain_steps = Pace(), []
    for number in range(300):
        due = pace.plain_due(1)
        pace.record(drafted=not due, requests=1, tokens=1, seconds=0.1)
        if due:
            plain_steps.append(number)
    gaps = [later - earlier for earlier, later in pairwise(plain_steps)]
    assert plain_steps[FEWEST - 1] < 25
    assert set(gaps[FEWEST:]) == {PLAIN_EVERY + 1}


def test_what_drafting_was_worth_is_forgotten_after_a_while() -> None:
    pace = fed(0, FEWEST)
    for _ in range(RETRY_AFTER - 1):
        pace.record(drafted=False, requests=16, tokens=16, seconds=0.2)
    assert pace.gain(16) is not None
    pace.record(drafted=False, requests=16, tokens=16, seconds=0.2)
    assert pace.gain(16) is None
