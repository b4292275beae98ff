"""What a step that was served says of what steps cost."""

from dspark.core.refresh import StepTime
from dspark.core.types import DraftBatch
from dspark.engine.events import StepStats
from dspark_services.scheduler.observer import StepTiming


def step_time(
    stats: StepStats, timing: StepTiming, drafting: DraftBatch | None, block_size: int
) -> StepTime | None:
    """The step as the cost surface is measured; None where it was no usual one.

    Drafts are timed as in the profile: whole blocks of sequences that the drafter holds and was
    asked about in the step before, the wire included.
    """
    if stats.batch_tokens == 0 or stats.reopened:
        return None
    rows = () if drafting is None else drafting.rows
    usual = (
        all(row.base_committed_len and len(row.tokens) <= block_size + 1 for row in rows)
        and max((row.num_draft for row in rows), default=0) == block_size
    )
    return StepTime(
        batch_tokens=stats.batch_tokens,
        head_rows=stats.head_rows,
        context_tokens=stats.context_tokens,
        verify_seconds=timing.verify,
        draft_rows=len(rows) if usual else 0,
        draft_seconds=timing.draft_wait,
        overhead_seconds=max(timing.total - timing.draft_wait - timing.verify, 0.0),
    )
