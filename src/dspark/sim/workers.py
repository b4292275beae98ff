"""The two workers, virtual: they speak the messages of `core.types`, know how every request goes
on, and take modelled seconds instead of real ones."""

from collections.abc import Mapping

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.types import (
    Draft,
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    RowStatus,
    SequenceKey,
    Verdict,
    VerificationMode,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.sim.script import RIGHT, WRONG, Script


def features(positions: int) -> bytes:
    """What stands for the features of so many positions."""
    return bytes(positions)


class VirtualDrafter:
    """Proposes what the scripts say; `scripts` is shared with whoever adds the requests."""

    def __init__(
        self, scripts: Mapping[SequenceKey, Script], cost: StepCost, block_size: int
    ) -> None:
        self.info = DrafterInfo(1, "virtual", "", "", block_size, "virtual", "virtual")
        self._scripts = scripts
        self._cost = cost
        # rejection mode carries these beside each token; no planner may look at them
        self._q = np.ones(block_size, np.float32)
        self._cut = np.full(block_size, -np.inf, np.float32)

    def draft(self, batch: DraftBatch) -> DraftReply:
        drafts = tuple(self._row(row) for row in batch.rows)
        return DraftReply(batch.step, drafts, self._cost.draft_seconds(len(batch.rows)))

    def _row(self, row: DraftRow) -> Draft:
        script, count = self._scripts[row.key], row.num_draft
        position = row.base_committed_len + len(row.tokens) - script.prompt_len
        sampled = row.sampling.mode is VerificationMode.REJECTION
        return Draft(
            key=row.key,
            tokens=script.blocks.tokens[position, :count],
            confidence_logits=script.blocks.confidence_logits[position, :count],
            q=self._q[:count] if sampled else None,
            cut=self._cut[:count] if sampled else None,
            hidden=bytes(count) if sampled else b"",
        )


class VirtualVerifier:
    """Keeps a draft up to its first wrong token, and says RIGHT behind it."""

    def __init__(self, cost: StepCost) -> None:
        self._cost = cost
        self._computed: dict[SequenceKey, int] = {}  # tokens in the KV cache

    def verify(self, batch: VerifyBatch) -> VerifyReply:
        """Seconds are 0 for a batch that only closes sequences."""
        for key in batch.close:
            self._computed.pop(key, None)
        batch_tokens = head_rows = context_tokens = 0
        verdicts = []
        for row in batch.rows:
            drafted = 0 if row.draft is None else len(row.draft.tokens)
            verdict, reached = self._row(row)
            batch_tokens += row.num_pending + drafted
            head_rows += 0 if verdict.next_token is None else 1 + drafted
            context_tokens += reached
            verdicts.append(verdict)
        seconds = head_seconds = 0.0
        if verdicts:
            head_seconds = self._cost.head_row_seconds * head_rows
            seconds = float(self._cost.verify_seconds(batch_tokens, head_rows, context_tokens))
        return VerifyReply(
            batch.step,
            tuple(verdicts),
            seconds=seconds,
            backbone_seconds=seconds - head_seconds,
            head_seconds=head_seconds,
            batch_tokens=batch_tokens,
        )

    def _row(self, row: VerifyRow) -> tuple[Verdict, int]:
        """The verdict, and the committed tokens that the row attends to."""
        start = 0 if row.open is not None else self._computed[row.key]
        reached = computed = start + row.num_pending
        accepted, next_token = 0, None
        if reached == row.base_committed_len:
            accepted, next_token = _right(row.draft), RIGHT
            computed += accepted
        self._computed[row.key] = computed
        verdict = Verdict(
            row.key,
            RowStatus.OK,
            computed,
            accepted=accepted,
            next_token=next_token,
            features=features(computed - start) if row.want_features else b"",
        )
        return verdict, reached


def _right(draft: Draft | None) -> int:
    """Draft tokens before the first wrong one."""
    if draft is None:
        return 0
    tokens: list[int] = draft.tokens.tolist()
    return tokens.index(WRONG) if WRONG in tokens else len(tokens)
