"""Drafts as the engine receives them: are they usable, how likely is each token, and cutting them.

A drafter is never trusted: what does not fit is dropped, and the row is decoded plainly.
"""

from dataclasses import replace
from math import isnan

from dspark.core.types import Draft, DraftSource, Floats, VerificationMode


def is_usable(draft: Draft, num_draft: int, mode: VerificationMode, vocab_size: int) -> bool:
    """Whether a drafter's draft is in sync, its own, no longer than asked for, complete for `mode`,
    in range."""
    tokens = draft.tokens.tolist()
    length = len(tokens)
    per_token = [draft.confidence_logits]
    if mode is VerificationMode.REJECTION:
        if draft.q is None or draft.cut is None or _is_ragged(draft.hidden, length):
            return False
        per_token += [draft.q, draft.cut]
    return (
        draft.in_sync
        and draft.source is DraftSource.MODEL
        and length <= num_draft
        and (not tokens or (min(tokens) >= 0 and max(tokens) < vocab_size))
        and all(len(values) == length for values in per_token)
        and not any(any(map(isnan, values.tolist())) for values in per_token)
    )


def _is_ragged(rows: bytes, count: int) -> bool:
    """Whether these bytes cannot be `count` rows of equal, positive width."""
    return count > 0 and (not rows or len(rows) % count != 0)


def cut(draft: Draft, length: int) -> Draft | None:
    """The first `length` tokens of a draft, None for none."""
    if length == 0:
        return None
    if length == len(draft.tokens):
        return draft

    def head(values: Floats | None) -> Floats | None:
        return None if values is None else values[:length]

    return replace(
        draft,
        tokens=draft.tokens[:length],
        confidence_logits=draft.confidence_logits[:length],
        q=head(draft.q),
        cut=head(draft.cut),
        hidden=draft.hidden[: len(draft.hidden) // len(draft.tokens) * length],
    )
