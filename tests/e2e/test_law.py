"""Sampling through the three services follows the target's own law, whatever is drafted.

Drafter and verifier are real workers behind gRPC, the scheduler is the real driver. The law is
enumerated; the draws are tested against it by chi-square. What they come to is fixed by their
nonces, so the outcome is the same in every run.
"""

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.core.statistics import chi_square_p_value
from dspark.core.types import SamplingParams
from dspark.ops.settings import Settings
from tests.support.draws import BIAS, Draws, Run, draw, exact_law, make_models

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SIGNIFICANCE = 1e-4
CUT = SamplingParams(temperature=0.9, top_k=6, top_p=0.9)
UNCUT = SamplingParams(temperature=1.0)

RUNS = {
    "causal": Run("causal", CUT, range(50_000)),
    "fixed": Run("fixed:2", CUT, range(50_000, 100_000)),
    "causal, uncut": Run("causal", UNCUT, range(100_000, 110_000)),
    "biased": Run("causal", CUT, range(110_000, 120_000), biased=True),
}


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return make_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def draws(settings: Settings) -> Iterator[dict[str, Future[Draws]]]:
    """All runs, two at a time, each in processes of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        yield {name: pool.submit(draw, settings, run) for name, run in RUNS.items()}


def p_value(counts: NDArray[np.int64], law: NDArray[np.float64]) -> float:
    """The smallest of the p-values of the two pairs of neighbouring tokens and of all three."""
    whole = [chi_square_p_value(counts.ravel(), law.ravel())]
    pairs = [
        chi_square_p_value(counts.sum(axis=axis).ravel(), law.sum(axis=axis).ravel())
        for axis in (0, 2)
    ]
    return min(whole + pairs)


@pytest.mark.parametrize("name", [name for name, run in RUNS.items() if not run.biased])
def test_the_law_is_the_targets(
    name: str, settings: Settings, draws: dict[str, Future[Draws]]
) -> None:
    result = draws[name].result()
    assert p_value(result.counts(), exact_law(settings, RUNS[name].sampling)) > SIGNIFICANCE


def test_the_law_of_a_hundred_thousand_draws_is_the_targets(
    settings: Settings, draws: dict[str, Future[Draws]]
) -> None:
    counts = draws["causal"].result().counts() + draws["fixed"].result().counts()
    assert counts.sum() == 100_000
    assert p_value(counts, exact_law(settings, CUT)) > SIGNIFICANCE


@pytest.mark.parametrize("name", RUNS)
def test_speculation_was_at_work(name: str, draws: dict[str, Future[Draws]]) -> None:
    """A drafter that is always or never right, or never asked, would prove nothing."""
    result = draws[name].result()
    answers = len(result.tokens)
    assert result.fallbacks == ()
    assert result.proposed > answers
    assert result.admitted > answers / 2
    assert 0.3 < result.accepted / result.admitted < 0.8
    if RUNS[name].planner == "causal":
        assert result.proposed - result.admitted > answers / 2  # trimmed, by confidence


def test_a_bias_of_two_percent_is_seen(settings: Settings, draws: dict[str, Future[Draws]]) -> None:
    law, counts = exact_law(settings, CUT), draws["biased"].result().counts()
    assert p_value(counts, law) < SIGNIFICANCE
    first = law.sum(axis=(1, 2))
    moved = np.abs(counts.sum(axis=(1, 2)) / counts.sum() - first).sum() / 2
    assert moved < 2 * BIAS  # that was no cruder defect than the one that was planted
