"""Every request arrives once, at the time its load says."""

import numpy as np
import pytest

from dspark.core.errors import ConfigError
from dspark.sim.load import Arrivals, ClosedLoop, Load, Poisson


def drain(arrivals: Arrivals) -> list[tuple[float, int]]:
    """All that come if each is answered ten seconds after its arrival."""
    taken: list[tuple[float, int]] = []
    while (time := arrivals.next_time) is not None:
        for arrival in arrivals.take(time):
            taken.append(arrival)
            arrivals.answered(time + 10)
    return taken


@pytest.mark.parametrize("load", [ClosedLoop(5), ClosedLoop(50), Poisson(3.0)])
@pytest.mark.parametrize("cells", [1, 3])
def test_each_request_reaches_one_cell(load: Load, cells: int) -> None:
    dealt = [[i for _, i in drain(load.arrivals(20, cell, cells, 0))] for cell in range(cells)]
    assert sorted(index for cell in dealt for index in cell) == list(range(20))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_users_wait_for_their_answers() -> None:
    assert drain(ClosedLoop(2).arrivals(5, 0, 1, 0)) == [
        (0.0, 0),
        (0.0, 1),
        (10.0, 2),
        (10.0, 3),
        (20.0, 4),
    ]


def test_a_rate_is_kept_over_all_cells() -> None:
    times = [t for cell in range(2) for t, _ in drain(Poisson(4.0).arrivals(4000, cell, 2, 1))]
    gaps = np.diff(sorted(times))
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.1)


def test_nothing_is_taken_before_its_time() -> None:
    arrivals = Arrivals([(1.0, 0), (2.0, 1)])
    assert arrivals.take(0.5) == []
    assert arrivals.take(1.5) == [(1.0, 0)]
    assert arrivals.next_time == 2.0


def test_loads_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="rate must be positive"):
        Poisson(0.0)
    with pytest.raises(ConfigError, match="use more users"):
        ClosedLoop(2).arrivals(10, 0, 3, 0)
