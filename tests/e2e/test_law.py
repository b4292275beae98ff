"""Sampling through the three services follows the target's own law, whatever is drafted.

Drafter and verifier are real workers behind gRPC, the scheduler is the real driver. The law is
enumerated; the draws are tested against it by chi-square. What they come to is fixed by their
nonces, so the outcome is the same in every run. The drafter's confidence in a token gives away the
one before it: a planner that makes use of that fails in 2,000 draws, those that only rank by it
pass in 100,000 (`capacity`) and 40,000 (`causal`).
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.core.planner import CapacityPlanner, CausalPlanner, FixedPlanner, ThresholdPlanner
from dspark.core.statistics import chi_square_p_value
from dspark.core.types import DraftSource, SamplingParams
from dspark.ops.settings import Settings
from tests.support.drafters import METHODS
from tests.support.draws import (
    BIAS,
    EVERY_TOKEN,
    REPEATED,
    TIGHT_COST,
    Draws,
    Run,
    draw,
    exact_law,
    make_method_models,
    make_models,
)
from tests.support.leaking import LeakingPlanner

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIGNIFICANCE = 1e-4
CUT = SamplingParams(temperature=0.9, top_k=6, top_p=0.9)
UNCUT = SamplingParams(temperature=1.0)

LAWFUL = {
    "capacity": Run(CapacityPlanner(), CUT, range(90_000), TIGHT_COST),
    "causal": Run(CausalPlanner(), CUT, range(100_000, 130_000)),
    "causal, uncut": Run(CausalPlanner(), UNCUT, range(200_000, 210_000)),
    "capacity, uncut": Run(CapacityPlanner(), UNCUT, range(210_000, 220_000), TIGHT_COST),
    "threshold": Run(ThresholdPlanner(0.5), CUT, range(220_000, 225_000)),
    "fixed": Run(FixedPlanner(2), CUT, range(230_000, 235_000)),
    "lookup": Run(
        FixedPlanner(2), CUT, range(300_000, 320_000), prompt=EVERY_TOKEN, lookup=True, model=False
    ),
    "lookup, uncut": Run(
        FixedPlanner(2), UNCUT, range(320_000, 330_000), prompt=REPEATED, lookup=True, model=False
    ),
    "both": Run(CausalPlanner(), CUT, range(330_000, 334_000), prompt=REPEATED, lookup=True),
}
UNLAWFUL = {
    "leaking": Run(LeakingPlanner(), CUT, range(240_000, 242_000)),
    "biased": Run(CausalPlanner(), CUT, range(250_000, 255_000), biased=True),
}
METHOD_DRAWS = 5000
EVERY_METHOD = {
    kind: Run(FixedPlanner(2), CUT, range(first, first + METHOD_DRAWS), kind=kind)
    for first, kind in zip(range(400_000, 500_000, METHOD_DRAWS), METHODS, strict=False)
    if kind != "dspark"  # it has the runs above
}
LAWFUL |= EVERY_METHOD
RUNS = LAWFUL | UNLAWFUL


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Settings]:
    """By kind of drafter."""
    own = {kind: make_method_models(tmp_path_factory.mktemp(kind), kind) for kind in EVERY_METHOD}
    return {"leaky": make_models(tmp_path_factory.mktemp("models")), **own}


@pytest.fixture(scope="module")
def draws(settings: dict[str, Settings]) -> Iterator[dict[str, Future[Draws]]]:
    """All runs, two at a time, each in processes of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        yield {name: pool.submit(draw, settings[run.kind], run) for name, run in RUNS.items()}


def p_value(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """The smallest of the p-values of the two pairs of neighbouring tokens and of all three."""
    whole = [chi_square_p_value(counts.ravel(), law.ravel())]
    pairs = [
        chi_square_p_value(counts.sum(axis=axis).ravel(), law.sum(axis=axis).ravel())
        for axis in (0, 2)
    ]
    return min(whole + pairs)


@pytest.mark.parametrize("name", LAWFUL)
def test_the_law_is_the_targets(
    name: str, settings: dict[str, Settings], draws: dict[str, Future[Draws]]
) -> None:
    result, run = draws[name].result(), RUNS[name]
    assert p_value(result.counts(), exact_law(settings[run.kind], run)) > SIGNIFICANCE


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_every_method_was_at_work(name: str, draws: dict[str, Future[Draws]]) -> None:
    result = draws[name].result()
    assert result.fallbacks == ()
    assert result.admitted > METHOD_DRAWS
    assert 0.04 < result.accepted / result.admitted < 0.95


@pytest.mark.parametrize(
    "name", [name for name, run in RUNS.items() if not run.lookup and name not in EVERY_METHOD]
)
def test_speculation_was_at_work(name: str, draws: dict[str, Future[Draws]]) -> None:
    """A drafter that is always or never right, or never asked, would prove nothing."""
    result = draws[name].result()
    answers = len(result.tokens)
    assert result.fallbacks == ()
    assert result.proposed > answers
    assert result.admitted > answers / 3
    assert 0.3 < result.accepted / result.admitted < 0.95
    if name != "fixed":
        assert result.proposed - result.admitted > answers / 2  # trimmed, by confidence


def test_lookups_were_at_work(draws: dict[str, Future[Draws]]) -> None:
    """Beside a model that is often right they are given up once it shows; they had their turn."""
    for name in ("lookup", "lookup, uncut"):
        result = draws[name].result()
        assert set(result.sources) == {DraftSource.NGRAM}
        assert 0.02 < result.accepted / result.admitted < 0.6
        assert result.admitted > len(result.tokens) / 4
    both = draws["both"].result().sources
    assert both[DraftSource.NGRAM] > 60
    assert both[DraftSource.MODEL] > 1000


def test_a_planner_that_looks_ahead_is_seen(
    settings: dict[str, Settings], draws: dict[str, Future[Draws]]
) -> None:
    """Of the tokens that were drafted first, it verifies the even ones: they come out too often."""
    law = exact_law(settings["leaky"], RUNS["leaking"])
    counts = draws["leaking"].result().counts()
    assert p_value(counts, law) < SIGNIFICANCE
    even = law[:, 0::2].sum()
    assert counts[:, 0::2].sum() / counts.sum() - even > 0.05


def test_a_bias_of_two_percent_is_seen(
    settings: dict[str, Settings], draws: dict[str, Future[Draws]]
) -> None:
    law = exact_law(settings["leaky"], RUNS["biased"])
    counts = draws["biased"].result().counts()
    assert p_value(counts, law) < SIGNIFICANCE
    first = law.sum(axis=(1, 2))
    moved = np.abs(counts.sum(axis=(1, 2)) / counts.sum() - first).sum() / 2
    assert moved < 2 * BIAS  # that was no cruder defect than the one that was planted
