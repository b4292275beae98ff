"""The verifier's worker: one packed target step for a batch of rows, then acceptance."""

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from dspark.core.errors import UnknownSequenceError
from dspark.core.types import (
    ProfileShape,
    RowStatus,
    SequenceKey,
    TargetInfo,
    Verdict,
    VerifyBatch,
    VerifyReply,
)
from dspark.modeling.acceptance import Candidate, Decision, decide
from dspark.modeling.backbone import Backbone
from dspark.modeling.drafters.shared import SharedDraftParts
from dspark.modeling.fusion import FeatureStore
from dspark.modeling.head import HeadRows, LocalHead
from dspark.modeling.kv import BlockPool
from dspark.modeling.packing import Job, lay_out, pack, validate
from dspark.modeling.profile import profile_steps
from dspark.modeling.sequences import HeldSequence, SequenceTable, payload_digest


class TargetWorker:
    """Runs the target over all open sequences. Synchronous; one caller at a time."""

    def __init__(
        self,
        backbone: Backbone,
        head: LocalHead,
        shared: SharedDraftParts | None = None,
        *,
        incarnation: int,
        model_id: str,
        target_digest: str,
        precision: str,
    ) -> None:
        """`shared` is the drafter's part that the verifier holds; without it there are no features,
        and in `rejection` mode only what was looked up is verified."""
        shape = backbone.kv.shape
        fusion_digest = shared.digest if shared else ""
        self.info = TargetInfo(
            incarnation=incarnation,
            model_id=model_id,
            target_digest=target_digest,
            head_digest=head.digest,
            fusion_digest=fusion_digest,
            vocab_size=head.vocab_size,
            max_context=min(
                backbone.config.max_position_embeddings, shape.num_blocks * shape.block_size
            ),
            num_blocks=shape.num_blocks,
            block_size=shape.block_size,
            precision=precision,
            device=str(backbone.kv.device),
        )
        self._backbone = backbone
        self._head = head
        self._shared = shared
        self._features = FeatureStore(shared, backbone.kv) if shared else None
        self._sequences = SequenceTable(
            BlockPool(shape.num_blocks, shape.block_size),
            backbone.kv,
            salt=f"{target_digest}:{fusion_digest}".encode(),
        )

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that an opening row could have, those of the prefix cache included."""
        return self._sequences.pool.num_free

    @torch.inference_mode()
    def verify(self, batch: VerifyBatch) -> VerifyReply:
        """Process a step; one verdict a row, in order. After an error the same batch may be sent
        again: no row counts as processed before all of them are.

        Raises:
            InvalidRequestError: a row contradicts itself or what the target can hold.
            OutOfBlocksError: an opening row finds too few free KV blocks.
        """
        started = perf_counter()
        for key in batch.close:
            self._sequences.close(key)
        validate(batch, self.info.vocab_size, self.info.max_context)
        verdicts, jobs = self._admit(batch)
        backbone_seconds = head_seconds = 0.0
        if jobs:
            backbone_started = perf_counter()
            output = self._backbone.forward(pack(jobs))
            head_started = perf_counter()
            decisions = self._decide(jobs, output.hidden, batch.step)
            head_seconds = perf_counter() - head_started
            backbone_seconds = head_started - backbone_started
            self._keep_features(jobs, decisions, output.taps)
            for job, decision in zip(jobs, decisions, strict=True):
                verdicts[job.row.key] = self._commit(job, decision, batch.step)
        return VerifyReply(
            step=batch.step,
            verdicts=tuple(verdicts[row.key] for row in batch.rows),
            seconds=perf_counter() - started,
            backbone_seconds=backbone_seconds,
            head_seconds=head_seconds,
            batch_tokens=sum(job.length for job in jobs),
        )

    def features(self, key: SequenceKey, start: int, stop: int) -> bytes:
        """Fused features of committed positions [start, stop) in the wire dtype; b"" without a
        drafter.

        Raises UnknownSequenceError if the target has not processed these positions.
        """
        sequence = self._sequences.get(key)
        if sequence is None or not 0 <= start <= stop <= sequence.computed_len:
            held = "not open" if sequence is None else f"processed up to {sequence.computed_len}"
            raise UnknownSequenceError(
                f"features [{start}, {stop}) of sequence {key.sequence} do not exist: it is {held}"
            )
        return self._read_features(sequence, start, stop)

    @torch.inference_mode()
    def profile(self, shapes: Sequence[ProfileShape], repeats: int) -> list[float]:
        """Seconds of a target step for each shape; see `profile_steps`."""
        return profile_steps(self._backbone, self._head, self._sequences.pool, shapes, repeats)

    def _admit(self, batch: VerifyBatch) -> tuple[dict[SequenceKey, Verdict], list[Job]]:
        """Answer the rows that need no computing; lay the others out end to end."""
        verdicts: dict[SequenceKey, Verdict] = {}
        jobs: list[Job] = []
        first = 0
        for row in batch.rows:
            payload = payload_digest(row)
            recalled = self._sequences.recall(batch.step, row, payload)
            if recalled is not None:
                verdicts[row.key] = recalled
                continue
            sequence = self._sequences.acquire(row)
            if sequence is None:
                verdicts[row.key] = Verdict(row.key, RowStatus.UNKNOWN, computed_len=0)
                continue
            jobs.append(lay_out(row, payload, sequence, first))
            first += jobs[-1].length
        return verdicts, jobs

    def _decide(self, jobs: list[Job], hidden: Tensor, step: int) -> list[Decision | None]:
        """The head and the acceptance rule, on the rows of the jobs that commit."""
        candidates = [
            Candidate(
                job.head_rows.start, job.sequence.tokens[-1], job.sequence.sampling, job.draft
            )
            for job in jobs
            if job.commits
        ]
        decided = iter(decide(HeadRows(self._head, hidden), candidates, step, self._shared))
        return [next(decided) if job.commits else None for job in jobs]

    def _keep_features(
        self, jobs: list[Job], decisions: list[Decision | None], taps: Tensor
    ) -> None:
        """Fuse the taps of all rows that stay, in one go."""
        if self._features is None:
            return
        rows: list[int] = []
        slots: list[Tensor] = []
        for job, decision in zip(jobs, decisions, strict=True):
            kept = job.pending + (decision.accepted if decision else 0)
            start = job.sequence.computed_len
            rows.extend(range(job.first, job.first + kept))
            slots.append(job.sequence.slots(start, start + kept, self.info.block_size))
        index = torch.tensor(rows, device=taps.device)
        self._features.write(torch.cat(slots), taps.index_select(0, index))

    def _commit(self, job: Job, decision: Decision | None, step: int) -> Verdict:
        sequence = job.sequence
        opens = job.row.open is not None
        held_before = sequence.computed_len
        sequence.computed_len += job.pending
        accepted, next_token = 0, None
        if decision is not None:
            accepted, next_token = decision.accepted, decision.next_token
            sequence.tokens += [*job.drafted[:accepted], next_token]
            sequence.computed_len += accepted
        self._sequences.publish_prompt(sequence)
        features = b""
        if job.row.want_features:
            # The drafter of a new sequence also lacks what the prefix cache gave.
            start = 0 if opens else held_before
            features = self._read_features(sequence, start, sequence.computed_len)
        verdict = Verdict(
            key=job.row.key,
            status=RowStatus.OK,
            computed_len=sequence.computed_len,
            cached_len=held_before if opens else 0,
            accepted=accepted,
            next_token=next_token,
            features=features,
            q_gap=decision.q_gap if decision else 0.0,
        )
        sequence.last_step, sequence.last_payload, sequence.last_verdict = (
            step,
            job.payload,
            verdict,
        )
        return verdict

    def _read_features(self, sequence: HeldSequence, start: int, stop: int) -> bytes:
        if self._features is None:
            return b""
        return self._features.read(sequence.slots(start, stop, self.info.block_size))
