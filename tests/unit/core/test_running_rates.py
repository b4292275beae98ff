import pytest

from dspark.core.running_rates import MEMORY, PRIOR_OUTCOMES, RunningRates


def test_rates_start_from_the_prior_and_follow_the_outcomes() -> None:
    rates = RunningRates([0.5, 0.25])
    assert rates.rates().tolist() == [0.5, 0.25]
    for _ in range(int(PRIOR_OUTCOMES)):
        rates.record(0, True)
    assert rates.rates()[0] == pytest.approx(0.75, abs=0.01)
    assert rates.rates()[1] == 0.25


def test_what_is_long_past_is_forgotten() -> None:
    rates = RunningRates([0.5])
    for outcome in (True, False):
        for _ in range(5 * MEMORY):
            rates.record(0, outcome)
        assert rates.rates()[0] == pytest.approx(float(outcome), abs=0.01)
