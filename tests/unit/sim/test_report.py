"""Figures from journeys whose every number is known."""

import pytest

from dspark.engine.events import Usage
from dspark.sim.cell import CellResult, Journey
from dspark.sim.report import Figures, Summary


def journey(domain: str, tokens: int, steps: int, **times: float) -> Journey:
    usage = Usage(3, tokens, 0, steps, proposed=8, admitted=6, accepted=tokens - steps)
    return Journey(domain, tokens, usage=usage, **times)


FAST = journey("math", tokens=11, steps=3, arrived=1.0, first_token=2.0, finished=4.0)
SLOW = journey("chat", tokens=5, steps=5, arrived=0.0, first_token=3.0, finished=11.0)
SHORT = journey("chat", tokens=1, steps=1, arrived=0.0, first_token=1.0, finished=1.0)


def test_lengths_are_means_over_decoding_rows() -> None:
    figures = Figures.of([FAST, SLOW])
    assert (figures.requests, figures.tokens) == (2, 16)
    assert figures.verified == pytest.approx((6 + 12) / 6)
    assert figures.accepted == pytest.approx(14 / 6)
    assert figures.trimmed == pytest.approx(4 / 16)


def test_a_users_rate_starts_with_the_first_token() -> None:
    figures = Figures.of([FAST, SLOW, SHORT])  # 10 tokens in 2 s, 4 in 8 s, and no second token
    assert figures.user_rate == pytest.approx((5.0 + 0.5) / 2)
    assert figures.user_rate_p10 == pytest.approx(0.5 + 0.1 * 4.5)
    assert figures.ttft == pytest.approx(1.0)


def test_what_has_no_denominator_is_no_number() -> None:
    figures = Figures.of([SHORT])
    assert (figures.user_rate, figures.verified, figures.accepted) == (None, None, None)


def test_unfinished_requests_are_no_figures() -> None:
    with pytest.raises(ValueError, match="finished"):
        Figures.of([Journey("math", 5, 0.0)])


def test_cells_are_merged_and_the_slowest_ends_the_run() -> None:
    cells = [CellResult([FAST], 4.0, 10, 5), CellResult([SLOW, SHORT], 11.0, 10, 0)]
    summary = Summary.of("causal", cells)
    assert (summary.seconds, summary.steps, summary.drafted) == (11.0, 20, 0.25)
    assert summary.throughput == pytest.approx(17 / 11)
    assert {name: own.requests for name, own in summary.domains.items()} == {"math": 1, "chat": 2}
