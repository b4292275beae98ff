"""A described card costs what its formulas say, at every batch size."""

from dataclasses import replace

import pytest

from dspark.core.errors import ConfigError
from dspark.sim.roofline import Card, Model, step_cost

CARD = Card(
    flops=1e12, bandwidth=1e10, efficiency=0.5, launch_seconds=0.001, overhead_seconds=0.002
)
MODEL = Model(
    parameters=1e8, head_parameters=1e7, drafter_parameters=2e7, weight_bytes=2, kv_bytes=1000
)


def test_a_step_reads_its_weights_until_arithmetic_takes_longer() -> None:
    cost = step_cost(CARD, MODEL, 4)
    memory = 1.1e8 * 2 / (1e10 * 0.5)
    for rows in (1, 10, 109, 110, 111, 220, 500):
        arithmetic = 2 * 1e8 * rows / (1e12 * 0.5)
        assert float(cost.tokens(rows)) == pytest.approx(0.001 + max(memory, arithmetic))
    assert cost.head_row_seconds == pytest.approx(2 * 1e7 / (1e12 * 0.5))
    assert cost.context_token_seconds == pytest.approx(1000 / (1e10 * 0.5))
    assert cost.overhead_seconds == 0.002


@pytest.mark.parametrize("length", [1, 7])
def test_a_draft_pays_for_the_tokens_it_drafts(length: int) -> None:
    cost = step_cost(CARD, MODEL, length)
    for requests in (1, 7, 14, 15, 64, 300):
        slower = max(2 * 2e7 * requests * length / 1e12, 2e7 * 2 / 1e10)
        assert cost.draft_seconds(requests) == pytest.approx(0.001 + slower / 0.5)


def test_a_planner_that_never_drafts_pays_for_no_draft() -> None:
    assert step_cost(CARD, MODEL, 0).draft is None


def test_steps_are_padded_to_the_next_captured_graph() -> None:
    plain = step_cost(CARD, MODEL, 4)
    tiered = step_cost(replace(CARD, graph_tiers=(64, 128, 256)), MODEL, 4)
    for rows, runs_as in ((1, 64), (65, 128), (128, 128), (129, 256), (256, 256), (300, 300)):
        assert float(tiered.tokens(rows)) == pytest.approx(float(plain.tokens(runs_as))), rows


@pytest.mark.parametrize(
    "changes", [{"flops": 0.0}, {"efficiency": 1.5}, {"graph_tiers": (8, 4)}, {"bandwidth": -1.0}]
)
def test_impossible_cards_are_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        replace(CARD, **changes)
