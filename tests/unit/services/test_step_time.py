"""Which steps teach what: the cost surface must not learn from those that were no usual ones."""

from dataclasses import replace

import pytest
from dspark_services.scheduler.observer import StepTiming
from dspark_services.scheduler.step_time import step_time

from dspark.core.types import DraftBatch, DraftRow, SamplingParams, SequenceKey
from dspark.engine.events import StepStats
from tests.unit.ops.test_metrics import outcome

TIMING = StepTiming(
    draft=0.010, draft_wait=0.012, plan=0.001, verify=0.1, backbone=0.08, head=0.02, wire=0.005,
    commit=0.002, total=0.119,
)  # fmt: skip
STATS: StepStats = outcome().stats


def batch(*rows: tuple[int, int]) -> DraftBatch:
    """Rows of (tokens the drafter holds, tokens wanted)."""
    return DraftBatch(
        1,
        tuple(
            DraftRow(SequenceKey(1, index), held, (1,), b"", wanted, SamplingParams())
            for index, (held, wanted) in enumerate(rows)
        ),
    )


def test_a_step_is_split_into_both_models_and_the_rest() -> None:
    step = step_time(STATS, TIMING, batch((5, 4), (9, 2)), block_size=4)
    assert step is not None
    assert (step.batch_tokens, step.head_rows, step.context_tokens) == (6, 6, 100)
    assert (step.verify_seconds, step.draft_rows, step.draft_seconds) == (0.1, 2, 0.012)
    assert step.overhead_seconds == pytest.approx(0.007)


@pytest.mark.parametrize(
    "drafting", [None, batch(), batch((0, 4), (9, 4)), batch((5, 3), (9, 1))],
    ids=["none", "closes only", "opens a sequence", "short blocks"],
)  # fmt: skip
def test_unusual_drafts_are_not_learned_from(drafting: DraftBatch | None) -> None:
    step = step_time(STATS, TIMING, drafting, block_size=4)
    assert step is not None
    assert step.draft_rows == 0


@pytest.mark.parametrize("unusual", [{"reopened": 1}, {"batch_tokens": 0}])
def test_unusual_steps_are_not_learned_from(unusual: dict[str, int]) -> None:
    assert step_time(replace(STATS, **unusual), TIMING, None, block_size=4) is None
