from itertools import pairwise

import numpy as np
import pytest

from dspark.engine.pace import (
    FEWEST_DRAFTED,
    FEWEST_PLAIN,
    MEMORY,
    PLAIN_EVERY,
    SURE_PLAIN_EVERY,
    Pace,
)


def fed(plain: int, drafted: int, *, requests: int = 16, drafted_seconds: float = 0.3) -> Pace:
    """Plain steps commit 16 tokens in 0.2 s, drafting ones 20."""
    pace = Pace()
    for _ in range(plain):
        pace.record(drafted=False, requests=requests, tokens=16, seconds=0.2)
    for _ in range(drafted):
        pace.record(drafted=True, requests=requests, tokens=20, seconds=drafted_seconds)
    return pace


def mean(pace: Pace, requests: int = 16) -> float | None:
    gain = pace.gain(requests)
    return None if gain is None else gain.mean


def test_the_gain_is_measured_tokens_per_second_over_plain_ones() -> None:
    assert mean(fed(FEWEST_PLAIN, FEWEST_DRAFTED)) == pytest.approx((20 / 0.3) / (16 / 0.2) - 1)
    assert mean(fed(FEWEST_PLAIN, FEWEST_DRAFTED, drafted_seconds=0.2)) == pytest.approx(0.25)


def test_its_error_is_the_spread_of_many_such_measurements() -> None:
    rng, measured = np.random.default_rng(0), []
    for _ in range(300):
        pace = Pace()
        for _ in range(16):
            pace.record(drafted=False, requests=1, tokens=1, seconds=rng.normal(0.05, 0.004))
        for _ in range(200):
            tokens = int(rng.integers(1, 5))
            pace.record(drafted=True, requests=1, tokens=tokens, seconds=rng.normal(0.08, 0.006))
        measured.append(pace.gain(1))
    means = np.array([gain.mean for gain in measured])
    errors = np.array([gain.error for gain in measured])
    assert means.mean() == pytest.approx(2.5 * 0.05 / 0.08 - 1, abs=0.02)
    assert errors.mean() == pytest.approx(means.std(), rel=0.25)


def test_a_few_steps_are_no_measurement() -> None:
    assert fed(FEWEST_PLAIN - 1, FEWEST_DRAFTED).gain(16) is None
    assert fed(FEWEST_PLAIN, FEWEST_DRAFTED - 1).gain(16) is None


def test_a_step_that_was_held_up_does_not_decide() -> None:
    pace, held_up = (fed(FEWEST_PLAIN + 3, FEWEST_DRAFTED) for _ in range(2))
    held_up.record(drafted=False, requests=16, tokens=16, seconds=60.0)
    assert mean(held_up) == pytest.approx(mean(pace))


def test_loads_are_told_apart_but_neighbours_are_one() -> None:
    pace = fed(FEWEST_PLAIN, FEWEST_DRAFTED)
    assert pace.gain(15) == pace.gain(17) == pace.gain(16)
    assert pace.gain(8) is None
    assert pace.gain(32) is None


@pytest.mark.parametrize(
    ("tokens", "every"),
    [((1, 1), PLAIN_EVERY), ((1, 12), PLAIN_EVERY), ((2, 2), SURE_PLAIN_EVERY)],
    ids=["no gain", "a gain that may be luck", "a gain beyond doubt"],
)
def test_plain_steps_come_soon_at_first_and_then_seldom(
    tokens: tuple[int, int], every: int
) -> None:
    pace, plain_steps = Pace(), []
    for number in range(2 * MEMORY):
        pace.gain(1)
        due = pace.plain_due(1)
        committed = 1 if due else tokens[number % 64 == 0]
        pace.record(drafted=not due, requests=1, tokens=committed, seconds=0.1)
        if due:
            plain_steps.append(number)
    gaps = [later - earlier for earlier, later in pairwise(plain_steps)]
    assert plain_steps[FEWEST_PLAIN - 1] < 25
    assert set(gaps[FEWEST_PLAIN:]) == {every + 1}


def test_what_drafting_was_worth_is_forgotten_after_a_while() -> None:
    pace = fed(0, FEWEST_DRAFTED)
    for _ in range(MEMORY - FEWEST_DRAFTED):
        pace.record(drafted=False, requests=16, tokens=16, seconds=0.2)
    assert pace.gain(16) is not None
    for _ in range(FEWEST_DRAFTED):
        pace.record(drafted=False, requests=16, tokens=16, seconds=0.2)
    assert pace.gain(16) is None
