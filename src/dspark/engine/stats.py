"""A step in numbers, from what its rows and the verifier's reply say."""

from collections import Counter
from collections.abc import Iterable

import numpy as np

from dspark.core.types import DraftSource, VerifyReply
from dspark.engine.events import GateStatus, StepStats
from dspark.engine.step import Row, Step


def summarise(
    step: Step, reply: VerifyReply, *, waiting: int, running: int, gate: GateStatus
) -> StepStats:
    """The statistics of a step that was just committed."""
    committed = [row for row in step.rows if row.committed]
    decoded = [row for row in committed if row.decoding]
    shadowed = [row for row in decoded if row.shadowed]
    block_size = 0 if step.scores is None else step.scores.survival.shape[1]
    return StepStats(
        rows=len(committed),
        prefill_tokens=sum(row.num_pending for row in step.rows if not row.decoding),
        batch_tokens=reply.batch_tokens,
        head_rows=step.head_rows,
        context_tokens=step.context_tokens,
        proposed_by_position=_by_position((row.proposed for row in decoded), block_size),
        admitted_by_position=_by_position((row.admitted for row in decoded), block_size),
        accepted_by_position=_by_position((row.kept for row in decoded), block_size),
        verified_lengths=tuple(1 + row.admitted for row in decoded),
        accepted_lengths=tuple(row.committed for row in decoded),
        proposed_by_source=_by_source((row, row.proposed) for row in decoded),
        accepted_by_source=_by_source((row, row.kept) for row in decoded),
        destroyed=sum(row.destroyed for row in shadowed),
        spared=sum(row.proposed - row.planned - row.destroyed for row in shadowed),
        resynced=step.resynced,
        reopened=step.reopened,
        waiting=waiting,
        running=running,
        gate=gate,
        verify_seconds=reply.seconds,
        predicted_seconds=step.predicted_seconds,
        q_gap=max((verdict.q_gap for verdict in reply.verdicts), default=0.0),
    )


def _by_source(counts: Iterable[tuple[Row, int]]) -> Counter[DraftSource]:
    total: Counter[DraftSource] = Counter()
    for row, count in counts:
        if row.draft is not None:
            total[row.draft.source] += count
    return total


def _by_position(lengths: Iterable[int], block_size: int) -> tuple[int, ...]:
    """How many of the lengths reach beyond each position 0..block_size-1."""
    reached = np.array(list(lengths), np.int64)[:, None] > np.arange(block_size)
    return tuple(reached.sum(axis=0).tolist())
