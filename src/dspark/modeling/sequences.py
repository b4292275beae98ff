"""What the verifier remembers of each sequence: tokens, KV blocks, and its last verdict."""

import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import OutOfBlocksError
from dspark.core.types import (
    OpenSequence,
    RowStatus,
    SamplingParams,
    SequenceKey,
    Verdict,
    VerifyRow,
)
from dspark.modeling.kv import BlockPool, KVCache


@dataclass(slots=True)
class HeldSequence:
    """Committed tokens of one sequence and where their keys, values and features lie.

    `tokens[:computed_len]` are in the KV cache; whatever the cache holds beyond is garbage that the
    next step overwrites before anything attends to it. That makes a rollback free.
    """

    tokens: list[int]
    sampling: SamplingParams
    max_len: int
    blocks: list[int]
    prompt_len: int
    computed_len: int
    num_published: int  # blocks of the prompt that the prefix cache has already
    last_step: int = -1
    last_payload: bytes = b""
    last_verdict: Verdict | None = None

    def roll_back(self, committed_len: int) -> None:
        """Forget tokens past `committed_len`; the anchor counts as not processed."""
        del self.tokens[committed_len:]
        self.computed_len = min(self.computed_len, committed_len - 1)

    def slots(self, start: int, stop: int, block_size: int) -> Tensor:
        """Cache slots of positions [start, stop)."""
        positions = np.arange(start, stop)
        blocks = np.asarray(self.blocks)[positions // block_size]
        return torch.from_numpy(blocks * block_size + positions % block_size)


@dataclass(slots=True)
class SequenceTable:
    """All open sequences of one scheduler, and the rules of repeated, late and lost messages.

    A scheduler with another incarnation has no use for what its predecessor left open, so its
    first row closes all of it.
    """

    pool: BlockPool
    cache: KVCache
    salt: bytes
    _incarnation: int | None = None
    _latest_step: int = -1
    _held: dict[SequenceKey, HeldSequence] = field(default_factory=dict)

    def get(self, key: SequenceKey) -> HeldSequence | None:
        return self._held.get(key)

    def recall(self, step: int, row: VerifyRow, payload: bytes) -> Verdict | None:
        """The answer to a row that must not be computed (again), else None.

        Same step and payload: the stored verdict. Same step, other payload: CONFLICT. Older step:
        STALE.
        """
        if row.key.incarnation != self._incarnation:
            for key in list(self._held):
                self.close(key)
            self._incarnation, self._latest_step = row.key.incarnation, -1
        self._latest_step = max(self._latest_step, step)
        sequence = self._held.get(row.key)
        if sequence is None:
            # Closed since: a late opening row must not bring the sequence back.
            return Verdict(row.key, RowStatus.STALE, 0) if step < self._latest_step else None
        if step > sequence.last_step:
            return None
        if step == sequence.last_step and payload == sequence.last_payload:
            return sequence.last_verdict
        status = RowStatus.STALE if step < sequence.last_step else RowStatus.CONFLICT
        return Verdict(row.key, status, sequence.computed_len)

    def acquire(self, row: VerifyRow) -> HeldSequence | None:
        """The row's sequence, opened or rolled back as it says; None if these tokens are not held.

        Raises OutOfBlocksError when an opening row finds too few free KV blocks.
        """
        if row.open is not None:
            self.close(row.key)
            self._held[row.key] = self._open(row.open)
        sequence = self._held.get(row.key)
        if sequence is None:
            return None
        # The prompt's blocks are shared through the prefix cache, so they can never be rewritten.
        if not sequence.prompt_len <= row.base_committed_len <= len(sequence.tokens):
            return None
        sequence.roll_back(row.base_committed_len)
        return sequence

    def close(self, key: SequenceKey) -> None:
        """Free the sequence's blocks, leaving those it filled to the prefix cache."""
        sequence = self._held.pop(key, None)
        if sequence is not None:
            self._publish(sequence, sequence.computed_len // self.pool.block_size)
            self.pool.free(sequence.blocks)

    def publish_prompt(self, sequence: HeldSequence) -> None:
        """Offer the prompt's full blocks to other sequences as soon as they are computed."""
        filled = min(sequence.prompt_len, sequence.computed_len) // self.pool.block_size
        if filled > sequence.num_published:
            self._publish(sequence, filled)
            sequence.num_published = filled

    def _open(self, opening: OpenSequence) -> HeldSequence:
        tokens = [int(token) for token in opening.tokens]
        hits = self.pool.match(tokens, self.salt)
        try:
            blocks = self._blocks(hits, -(-opening.max_len // self.pool.block_size))
        except OutOfBlocksError:
            self.pool.free(hits)
            raise
        return HeldSequence(
            tokens=tokens,
            sampling=opening.sampling,
            max_len=opening.max_len,
            blocks=blocks,
            prompt_len=len(tokens),
            computed_len=len(hits) * self.pool.block_size,
            num_published=len(hits),
        )

    def _blocks(self, hits: list[int], count: int) -> list[int]:
        """``count`` blocks that begin with the contents of ``hits``, whose references they take
        over. Copied once into a run of its own, a prefix need not be gathered in every step."""
        run = self.pool.allocate_run(count) if hits else None
        if run is None:
            return [*hits, *self.pool.allocate(count - len(hits))]
        self.cache.copy_blocks(hits, run[: len(hits)])
        self.pool.free(hits)
        return run

    def _publish(self, sequence: HeldSequence, num_blocks: int) -> None:
        tokens = sequence.tokens[: num_blocks * self.pool.block_size]
        self.pool.publish(tokens, self.salt, sequence.blocks[:num_blocks])


def payload_digest(row: VerifyRow) -> bytes:
    """Tells two rows for the same (sequence, step) apart."""
    opening, draft = row.open, row.draft
    parts: list[bytes] = []
    if draft is not None:
        arrays = (draft.tokens, draft.q, draft.cut)
        parts = [b"" if part is None else np.asarray(part).tobytes() for part in arrays]
        parts += [draft.hidden, draft.source.encode()]
    described = (
        row.base_committed_len,
        row.num_pending,
        row.want_features,
        None if opening is None else (list(opening.tokens), opening.sampling, opening.max_len),
        [len(part) for part in parts],
    )
    digest = hashlib.blake2b(repr(described).encode(), digest_size=16)
    for part in parts:
        digest.update(part)
    return digest.digest()
