"""The drafter's worker: keeps every sequence's draft context and drafts for batches of them."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dspark.core.errors import DrafterError
from dspark.core.rng import Purpose, uniform
from dspark.core.types import (
    Draft,
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    Scaling,
    SequenceKey,
    VerificationMode,
)
from dspark.modeling.drafters.context import DraftContext
from dspark.modeling.drafters.heads import certainty
from dspark.modeling.drafters.interface import Drafter, OpenBlocks
from dspark.modeling.drafters.served import serve
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.linear import Precision, linear_function
from dspark.modeling.sampling import argmax, draw, probabilities

_WIRE_BYTES = SharedDraftParts.wire_dtype.itemsize


@dataclass(slots=True)
class _Sequence:
    """What is held of one sequence: features of all its tokens but the last, and the last."""

    context: DraftContext
    anchor: int

    @property
    def length(self) -> int:
        return self.context.length + 1


class DraftWorker:
    """Synchronous, not thread-safe: one call at a time. It takes the model over for inference."""

    def __init__(
        self,
        model: Drafter,
        *,
        name: str,
        incarnation: int,
        target_digest: str,
        precision: Precision,
        calibration: Mapping[str, Scaling] | None = None,
    ) -> None:
        self._shared = SharedDraftParts.from_model(model, precision)
        self._rough_logits = self._shared.base_logits
        if precision == "bf16":
            product = linear_function(model.head.bfloat16(), None, precision)
            self._rough_logits = lambda hidden: model.shaped(product(hidden).float())
        self._confidence = model.confidence
        self._has_no_confidence = model.confidence_head is None
        self._width = model.config.hidden_size
        self._model = serve(model, precision)
        self._sequences: dict[SequenceKey, _Sequence] = {}
        self.info = DrafterInfo(
            incarnation=incarnation,
            name=name,
            target_digest=target_digest,
            fusion_digest=self._shared.digest,
            block_size=model.config.block_size,
            precision=precision,
            device="cpu",
            calibration=calibration or {},
        )

    def draft(self, batch: DraftBatch) -> DraftReply:
        """Take in what was committed, then draft a block for every row that wants one.

        Rows of another scheduler incarnation end what its predecessor left open.

        Raises:
            DrafterError: a row contradicts itself; then nothing was changed but what was closed.
        """
        started = time.perf_counter()
        for key in batch.close:
            self._sequences.pop(key, None)
        self._forget_predecessors(batch.rows)
        rows = [row for row in batch.rows if self._in_sync(row)]
        for row in rows:
            self._check(row)
        with torch.inference_mode():
            self._absorb(rows)
            drafting = [row for row in rows if row.num_draft]
            drafted = self._draft_blocks(batch.step, drafting) if drafting else {}
        in_sync = {row.key for row in rows}
        drafts = tuple(
            drafted.get(row.key) or _no_draft(row.key, in_sync=row.key in in_sync)
            for row in batch.rows
        )
        return DraftReply(batch.step, drafts, time.perf_counter() - started)

    def _forget_predecessors(self, rows: Sequence[DraftRow]) -> None:
        """A scheduler that ended without closing its sequences will never ask for them again."""
        present = {row.key.incarnation for row in rows}
        if present and any(key.incarnation not in present for key in self._sequences):
            self._sequences = {k: s for k, s in self._sequences.items() if k.incarnation in present}

    def _in_sync(self, row: DraftRow) -> bool:
        held = self._sequences.get(row.key)
        return row.base_committed_len in (0, held.length if held else 0)

    def _check(self, row: DraftRow) -> None:
        if row.base_committed_len == 0 and not row.tokens:
            raise DrafterError(f"sequence {row.key} was started without tokens")
        if not 0 <= row.num_draft <= self.info.block_size:
            raise DrafterError(
                f"{row.num_draft} drafts were asked for sequence {row.key}, "
                f"a block has at most {self.info.block_size}"
            )
        expected = _new_features(row) * self._width * _WIRE_BYTES
        if len(row.features) != expected:
            raise DrafterError(
                f"sequence {row.key} came with {len(row.features)} bytes of features, "
                f"expected {expected} for {len(row.tokens)} tokens after {row.base_committed_len}"
            )

    def _absorb(self, rows: Sequence[DraftRow]) -> None:
        for row in rows:
            if row.base_committed_len == 0:
                context = self._model.new_context()
                self._sequences[row.key] = _Sequence(context, row.tokens[-1])
            elif row.tokens:
                self._sequences[row.key].anchor = row.tokens[-1]
        growing = [row for row in rows if row.features]
        if growing:
            self._model.extend(
                [self._sequences[row.key].context for row in growing],
                self._shared.unpack(b"".join(row.features for row in growing)),
                # A feature's row is the one before its token's, so the last of these are theirs.
                torch.tensor([t for row in growing for t in row.tokens[-_new_features(row) :]]),
                [_new_features(row) for row in growing],
            )

    def _draft_blocks(self, step: int, rows: Sequence[DraftRow]) -> dict[SequenceKey, Draft]:
        sequences = [self._sequences[row.key] for row in rows]
        anchors = torch.tensor([sequence.anchor for sequence in sequences])
        blocks = self._model.open_blocks([sequence.context for sequence in sequences])
        walked = self._walk(step, rows, blocks, anchors)
        previous = torch.cat((anchors[:, None], walked.tokens[:, :-1]), dim=1)
        learnt = self._confidence(walked.hidden.float(), previous)
        confidence = (walked.sure if learnt is None else learnt).numpy()
        drafts = {}
        for index, row in enumerate(rows):
            block = (index, slice(row.num_draft))
            draft = Draft(row.key, walked.tokens[block].numpy(), confidence[block])
            if row.sampling.mode is VerificationMode.REJECTION:
                packed = self._shared.pack(walked.hidden[block])
                draft = replace(draft, q=walked.q[block], cut=walked.cuts[block], hidden=packed)
            drafts[row.key] = draft
        return drafts

    def _walk(
        self, step: int, rows: Sequence[DraftRow], blocks: OpenBlocks, anchors: Tensor
    ) -> "_Walked":
        """Choose the tokens position by position. anchors: [R]."""
        count, width = len(rows), max(row.num_draft for row in rows)
        sampled = [i for i, r in enumerate(rows) if r.sampling.mode is VerificationMode.REJECTION]
        # What is drawn the verifier has to rebuild; a greedy draft is a guess, and may be a rough
        # one.
        logits_of = self._shared.base_logits if sampled else self._rough_logits
        sampling = [rows[i].sampling for i in sampled]
        tokens = torch.empty(count, width, dtype=torch.int64)
        sure = torch.zeros(count, width)
        q, cuts = np.zeros((2, count, width), np.float32)
        hidden: list[Tensor] = []  # [R, d] of each position, as far as it is known
        base: list[Tensor] = []  # [R, U]
        head = self._shared.sequential_head
        previous, state = anchors, head.start(count)
        for k in range(width):
            if k == len(hidden):
                # Rounded before any logit is computed, so that the verifier can rebuild the same q.
                fresh = blocks.rows(previous)[:, : width - k].to(self._shared.wire_dtype)
                logits = logits_of(fresh.flatten(0, 1))
                hidden += fresh.unbind(1)
                base += logits.view(*fresh.shape[:2], -1).unbind(1)
            vectors, state = head.step(hidden[k], previous, state)
            logits = head.combine(base[k], vectors)
            columns = argmax(logits)
            if self._has_no_confidence:
                sure[:, k] = certainty(torch.softmax(logits, -1).amax(-1))
            if sampled:
                weights, cut = probabilities(logits[sampled], sampling)
                uniforms = [uniform(s.nonce, step, Purpose.DRAFT, k) for s in sampling]
                columns[sampled] = drawn = draw(weights, np.array(uniforms))
                q[sampled, k] = weights.numpy()[np.arange(len(sampled)), drawn]
                cuts[sampled, k] = cut.numpy()
                if self._has_no_confidence:
                    sure[sampled, k] = certainty(weights.amax(-1))
            previous = tokens[:, k] = self._shared.target_ids(torch.from_numpy(columns))
        return _Walked(torch.stack(hidden, 1), tokens, sure, q, cuts)


@dataclass(frozen=True, slots=True)
class _Walked:
    """What came of a walk over R blocks of K positions."""

    hidden: Tensor  # [R, K, d] rounded to the wire dtype
    tokens: Tensor  # [R, K] target ids
    sure: Tensor  # [R, K] certainties, instead of the confidence that a drafter has not learnt
    q: np.ndarray  # [R, K], meaningful on `rejection` rows, as are
    cuts: np.ndarray  # [R, K]


def _new_features(row: DraftRow) -> int:
    """Positions that lie before the anchor after this row and did not before it."""
    return row.base_committed_len + len(row.tokens) - max(row.base_committed_len, 1)


def _no_draft(key: SequenceKey, *, in_sync: bool) -> Draft:
    return Draft(key, np.empty(0, np.int64), np.empty(0, np.float32), in_sync=in_sync)
