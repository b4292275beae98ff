"""Laying the rows of a verify batch out in one packed target step."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from dspark.core.errors import InvalidRequestError
from dspark.core.types import Draft, DraftSource, Floats, VerificationMode, VerifyBatch, VerifyRow
from dspark.modeling.backbone import PackedStep, Span
from dspark.modeling.sequences import HeldSequence


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence's share of a packed step: `pending` committed tokens, then the draft."""

    row: VerifyRow
    payload: bytes
    sequence: HeldSequence
    first: int  # its first row in the step
    pending: int
    commits: bool  # the pending tokens reach the anchor
    draft: Draft | None  # None while prefill goes on, or if there is nothing to verify

    @property
    def drafted(self) -> list[int]:
        return [] if self.draft is None else [int(token) for token in self.draft.tokens]

    @property
    def tokens(self) -> list[int]:
        start = self.sequence.computed_len
        return self.sequence.tokens[start : start + self.pending] + self.drafted

    @property
    def length(self) -> int:
        return self.pending + len(self.drafted)

    @property
    def head_rows(self) -> range:
        """Rows whose logits decide: the anchor's and the draft's."""
        anchor = self.first + self.pending - 1
        return range(anchor, self.first + self.length) if self.commits else range(0)


def lay_out(row: VerifyRow, payload: bytes, sequence: HeldSequence, first: int) -> Job:
    """Fix what of a row this step processes. Raises InvalidRequestError for a draft that the
    sequence has no room for or that lacks what its mode needs."""
    waiting = len(sequence.tokens) - sequence.computed_len
    pending = min(row.num_pending, waiting)
    commits = pending == waiting
    draft = row.draft if commits and row.draft is not None and len(row.draft.tokens) else None
    if draft is not None:
        if len(sequence.tokens) + len(draft.tokens) > sequence.max_len:
            raise InvalidRequestError(
                f"sequence {row.key.sequence} has {len(sequence.tokens)} tokens and a draft of "
                f"{len(draft.tokens)}, but was opened for {sequence.max_len}"
            )
        drawn = (
            sequence.sampling.mode is VerificationMode.REJECTION
            and draft.source is DraftSource.MODEL
        )
        if drawn and not (_covers(draft.q, draft) and _covers(draft.cut, draft) and draft.hidden):
            raise InvalidRequestError(
                f"sequence {row.key.sequence} samples, but its draft lacks q, cuts or hidden rows"
            )
    return Job(row, payload, sequence, first, pending, commits, draft)


def pack(jobs: Sequence[Job]) -> PackedStep:
    return PackedStep(
        token_ids=torch.tensor([token for job in jobs for token in job.tokens]),
        spans=tuple(Span(j.sequence.blocks, j.sequence.computed_len, j.length) for j in jobs),
    )


def validate(batch: VerifyBatch, vocab_size: int, max_context: int) -> None:
    """Refuse a batch that contradicts itself or the target, before anything changes.

    Raises InvalidRequestError.
    """
    if len({row.key for row in batch.rows}) < len(batch.rows):
        raise InvalidRequestError(f"step {batch.step} holds two rows of one sequence")
    for row in batch.rows:
        where = f"sequence {row.key.sequence} in step {batch.step}"
        if row.num_pending < 1:
            raise InvalidRequestError(f"{where} has no pending token; every row needs one or more")
        if row.open is not None:
            held = len(row.open.tokens)
            if held != row.base_committed_len or held == 0:
                raise InvalidRequestError(
                    f"{where} opens with {held} tokens but claims {row.base_committed_len}"
                )
            if not held <= row.open.max_len <= max_context:
                raise InvalidRequestError(
                    f"{where} opens {held} tokens with room for {row.open.max_len}; "
                    f"the target holds at most {max_context}"
                )
            _check_tokens(np.asarray(row.open.tokens), vocab_size, where)
        if row.draft is not None and len(row.draft.tokens):
            _check_tokens(row.draft.tokens, vocab_size, where)


def _covers(values: Floats | None, draft: Draft) -> bool:
    return values is not None and len(values) == len(draft.tokens)


def _check_tokens(tokens: NDArray[np.int64], vocab_size: int, where: str) -> None:
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise InvalidRequestError(f"{where} holds a token outside the vocabulary of {vocab_size}")
