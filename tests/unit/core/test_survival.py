from dataclasses import FrozenInstanceError
from typing import get_type_hints

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark.core.planner import CapacityPlanner, CausalPlanner, Planner
from dspark.core.survival import CurrentScores, DeterminedScores, HistoricalScores
from dspark.core.types import VerificationMode


def test_survival_is_the_cumulative_product_and_zero_behind_the_draft() -> None:
    scores = CurrentScores.from_confidences([[0.5, 0.5], [], [0.9]], block_size=3)
    np.testing.assert_array_equal(scores.survival, [[0.5, 0.25, 0], [0, 0, 0], [0.9, 0, 0]])


def test_current_and_historical_scores_do_not_pass_for_each_other() -> None:
    assert not issubclass(CurrentScores, HistoricalScores)
    assert not issubclass(HistoricalScores, CurrentScores)
    for planner in (Planner, CausalPlanner, CapacityPlanner):
        assert get_type_hints(planner.plan)["scores"] is CurrentScores
        assert get_type_hints(planner.outlook)["scores"] is HistoricalScores


def test_only_scores_that_cannot_bias_anything_are_determined() -> None:
    scores = CurrentScores([[0.5, 0.25]])
    greedy, rejection = VerificationMode.GREEDY, VerificationMode.REJECTION
    np.testing.assert_array_equal(DeterminedScores.of(scores, {greedy}).survival, scores.survival)
    with pytest.raises(ValueError, match="may only rank"):
        DeterminedScores.of(scores, {greedy, rejection})


def test_scores_cannot_be_changed() -> None:
    given = np.array([[0.5, 0.25]])
    scores = CurrentScores(given)
    given[0, 0] = 0.9
    assert scores.survival[0, 0] == 0.5
    with pytest.raises(FrozenInstanceError):
        scores.survival = given  # type: ignore[misc]
    with pytest.raises(ValueError, match="read-only"):
        scores.survival[0, 0] = 0.9


@pytest.mark.parametrize(
    ("survival", "reason"),
    [
        (np.array([0.5]), "requests, block size"),
        (np.array([[1.1]]), r"in \[0, 1\]"),
        (np.array([[-0.1]]), r"in \[0, 1\]"),
        (np.array([[np.nan]]), r"in \[0, 1\]"),
        (np.array([[0.5, 0.6]]), "must not rise"),
    ],
)
def test_impossible_scores_are_refused(survival: NDArray[np.float64], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        HistoricalScores(survival)


def test_more_confidences_than_the_block_holds_are_refused() -> None:
    with pytest.raises(ValueError, match="request 1 has 3 confidences"):
        CurrentScores.from_confidences([[0.5], [0.5, 0.5, 0.5]], block_size=2)
