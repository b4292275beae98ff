"""Batches too large for one message, as two smaller ones of the same step with the same effect.

Workers take a step in parts: verifying is idempotent per sequence and step, and a drafter is told
of a sequence's tokens in any number of rows. What grows large is features: one row of the target's
width for each context token of a sequence that a drafter meets late.
"""

from dataclasses import replace

from dspark.core.types import DraftBatch, DraftReply, DraftRow, VerifyBatch, VerifyReply


def split_verify(batch: VerifyBatch) -> tuple[VerifyBatch, VerifyBatch] | None:
    """Half of the rows each; None for a single row, which cannot be split."""
    middle = len(batch.rows) // 2
    if middle == 0:
        return None
    return replace(batch, rows=batch.rows[:middle]), VerifyBatch(batch.step, batch.rows[middle:])


def join_verify(first: VerifyReply, second: VerifyReply) -> VerifyReply:
    """The reply to a batch, from those to its parts."""
    return VerifyReply(
        step=first.step,
        verdicts=first.verdicts + second.verdicts,
        seconds=first.seconds + second.seconds,
        backbone_seconds=first.backbone_seconds + second.backbone_seconds,
        head_seconds=first.head_seconds + second.head_seconds,
        batch_tokens=first.batch_tokens + second.batch_tokens,
    )


def without_features(reply: VerifyReply) -> VerifyReply:
    """The reply less what can be asked for again, in ranges of any length."""
    verdicts = tuple(replace(verdict, features=b"") for verdict in reply.verdicts)
    return replace(reply, verdicts=verdicts)


def split_draft(batch: DraftBatch) -> tuple[DraftBatch, DraftBatch] | None:
    """Half of the rows each, or half of a single row's tokens; None for a row of one token."""
    middle = len(batch.rows) // 2
    if middle:
        return replace(batch, rows=batch.rows[:middle]), DraftBatch(batch.step, batch.rows[middle:])
    if not batch.rows or len(batch.rows[0].tokens) < 2:
        return None
    first, second = _split_row(batch.rows[0])
    return replace(batch, rows=(first,)), DraftBatch(batch.step, (second,))


def join_draft(first: DraftReply, second: DraftReply) -> DraftReply:
    """The reply to a batch, from those to its parts; of a row in two parts, the second drafted."""
    drafts = {draft.key: draft for draft in (*first.drafts, *second.drafts)}
    return DraftReply(first.step, tuple(drafts.values()), first.seconds + second.seconds)


def _split_row(row: DraftRow) -> tuple[DraftRow, DraftRow]:
    """Two rows in a row: one that only informs, and one that informs of the rest and drafts."""
    middle = len(row.tokens) // 2
    held_between = row.base_committed_len + middle
    held_after = row.base_committed_len + len(row.tokens)
    known = max(row.base_committed_len, 1)  # the anchor has no features, nor has nothing
    cut = len(row.features) * (held_between - known) // (held_after - known)
    return (
        replace(row, tokens=row.tokens[:middle], features=row.features[:cut], num_draft=0),
        replace(
            row,
            base_committed_len=held_between,
            tokens=row.tokens[middle:],
            features=row.features[cut:],
        ),
    )
