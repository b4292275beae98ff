"""The drafter's side of a step: who drafts, what the drafter must be told, what its reply is worth.

A drafter is never trusted and never waited for: what is missing or does not fit becomes an empty
draft, that row is decoded plainly, and the sequence is synchronised anew.
"""

from collections.abc import Iterable
from itertools import compress

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.errors import StaleStepError
from dspark.core.planner import Planner
from dspark.core.survival import CurrentScores, DeterminedScores
from dspark.core.types import (
    DraftBatch,
    DrafterInfo,
    DraftReply,
    DraftRow,
    SequenceKey,
    VerificationMode,
)
from dspark.engine.calibrator import CalibrationStatus, Calibrator
from dspark.engine.drafts import is_usable
from dspark.engine.events import FeatureFetch, GateState, GateStatus
from dspark.engine.gate import DraftGate
from dspark.engine.history import History
from dspark.engine.sequence import Sequence
from dspark.engine.step import Row, Step

CAP_ACCEPT_ROWS = 4  # in a step: a busy batch then pays for a few rows, not for all of them


class Drafting:
    """Everything the engine knows about its drafter, attached or not."""

    def __init__(
        self, planner: Planner, cost: StepCost | None, vocab_size: int, cap_accept_every: int
    ) -> None:
        self._planner = planner
        self._vocab_size = vocab_size
        self._cap_accept_every = cap_accept_every
        self._gate = DraftGate(planner, cost)
        self._info: DrafterInfo | None = None
        self._incarnation: int | None = None  # of the last drafter attached
        self._calibrator: Calibrator | None = None  # of the last drafter attached
        self._history = History(block_size=0)
        self._closes: set[SequenceKey] = set()

    @property
    def status(self) -> GateStatus:
        return self._gate.status

    @property
    def calibration(self) -> dict[VerificationMode, CalibrationStatus]:
        """See `Engine.calibration`."""
        return {} if self._calibrator is None else self._calibrator.status()

    @property
    def has_closes(self) -> bool:
        return self._info is not None and bool(self._closes)

    @property
    def block_size(self) -> int:
        return 0 if self._info is None else self._info.block_size

    def attach(
        self,
        info: DrafterInfo | None,
        calibrator: Calibrator | None,
        running: Iterable[Sequence],
    ) -> None:
        """See `Engine.attach_drafter`."""
        if info is not None and info.incarnation != self._incarnation:
            self._calibrator = calibrator or Calibrator(info)
            self._incarnation = info.incarnation
            self._history = History(info.block_size)
            self._closes.clear()
            for sequence in running:
                sequence.forget_drafter()
        self._info = info
        if info is None:
            self._gate.close("no drafter attached")
        elif self._planner.draft_length(info.block_size) == 0:
            self._gate.close(f"planner {self._planner.name} never drafts")
        else:
            self._gate.open()

    def profiling(self) -> None:
        """See `Engine.profiling_drafter`."""
        self._gate.close("the drafter is being timed", GateState.PROFILING)

    def use_cost(self, cost: StepCost) -> None:
        """See `Engine.use_cost`."""
        self._gate.use_cost(cost)

    def took(self, step: Step, seconds: float) -> None:
        """See `Engine.took`."""
        tokens = sum(row.committed for row in step.rows)
        usual = not step.reopened and not any(row.shadowed for row in step.rows)
        if tokens and usual and all(row.decoding for row in step.rows):
            drafted = any(row.asked for row in step.rows)
            self._gate.took(
                drafted=drafted, requests=len(step.rows), tokens=tokens, seconds=seconds
            )

    def close(self, sequence: Sequence) -> None:
        """The sequence is over; the drafter is told with the next batch, if it may hold it."""
        if sequence.known_to_drafter:
            self._closes.add(sequence.key)

    def choose(self, step: Step, max_batch_tokens: int) -> tuple[FeatureFetch, ...]:
        """Decide, from history and committed state, which rows draft, how many tokens, and how
        many of these the step verifies at most.

        Returns the features to fetch first.
        """
        length = 0 if self._info is None else self._planner.draft_length(self._info.block_size)
        for row in step.rows:
            if row.decoding:
                row.max_draft = min(length, row.sequence.remaining - 1)  # the target adds one
        able = [row for row in step.rows if row.max_draft]
        if not able:
            return ()
        room = max(max_batch_tokens - step.base_tokens, 0)
        load = step.load(step.caps(), room, drafted=True)
        allowance = self._gate.decide(self._history, load)
        for row in able[allowance.rows :]:
            row.max_draft = 0
        step.capacity = allowance.capacity
        if allowance.rows and self._gate.status.state.pays:
            self._shadow(step.number, able, room)
        return tuple(
            FeatureFetch(row.sequence.key, context.wanted_start, row.sequence.computed_len)
            for row in able[: allowance.rows]
            if (context := row.sequence.draft_context).has_gap
        )

    def _shadow(self, step: int, rows: list[Row], room: int) -> None:
        """In every n-th step, have a few rows verified whole: cap-accept. Which ones follows from
        the step's number and from what the rows could draft, so it biases neither the output nor
        what is measured."""
        turn, rest = divmod(step, self._cap_accept_every or step + 1)
        if turn and not rest and sum(row.max_draft for row in rows) <= room:
            for place in range(min(CAP_ACCEPT_ROWS, len(rows))):
                rows[(turn * CAP_ACCEPT_ROWS + place) % len(rows)].shadowed = True

    def wants_features(self, row: Row) -> bool:
        """Whether the verdict of `row` should bring features, because the next step may draft."""
        return (
            self._gate.likely_to_draft
            and not row.sequence.draft_context.has_gap
            and row.sequence.remaining > 2  # one for this step's token, two for a draft to pay
        )

    def batch(self, step: Step, *, idle: bool) -> DraftBatch | None:
        """The step's draft batch. Closes wait for company, unless the engine is `idle`."""
        if self._info is None:
            return None
        rows = [
            row for row in step.rows if row.max_draft and not row.sequence.draft_context.has_gap
        ]
        if not rows and not (idle and self._closes):
            return None
        step.drafter = self._info
        step.drafter_closes = tuple(sorted(self._closes))
        for row in rows:
            row.sequence.known_to_drafter = True
            row.asked = True
        return DraftBatch(
            step.number,
            tuple(_draft_row(row) for row in rows),
            step.drafter_closes,
        )

    def receive(self, step: Step, reply: DraftReply | None) -> None:
        """Take the usable drafts. Raises StaleStepError for the reply of another step."""
        if reply is not None and reply.step != step.number:
            raise StaleStepError(
                f"The draft reply is for step {reply.step}, not {step.number}: drop it instead."
            )
        if self._info is not step.drafter:
            reply = None  # detached or replaced meanwhile: its answer means nothing now
        drafts = {} if reply is None else {draft.key: draft for draft in reply.drafts}
        if reply is not None:
            self._closes.difference_update(step.drafter_closes)
        for row in step.rows:
            if not row.asked:
                continue
            sequence, draft = row.sequence, drafts.get(row.sequence.key)
            mode = sequence.request.sampling.mode
            if draft is not None and is_usable(draft, row.max_draft, mode, self._vocab_size):
                row.draft = draft
                sequence.draft_context.delivered(sequence.committed_len)
            else:
                sequence.draft_context.forget(sequence.computed_len)
                step.resynced += reply is not None

    def scores(self, step: Step) -> CurrentScores:
        """Calibrated survival of the drafts of the rows that commit; 0 where there is none."""
        assert self._calibrator is not None, "drafts come from a drafter that was attached"
        confidences = self._calibrator.confidences(
            [row.draft for row in step.committing], _modes(step.committing)
        )
        scores = CurrentScores(np.cumprod(confidences, axis=1, dtype=np.float64))
        return DeterminedScores.of(scores, step.modes) if step.determined else scores

    def planned(self, step: Step) -> None:
        """The plan of a step that drafted is made."""
        self._gate.planned(trimmed=any(row.planned < row.proposed for row in step.committing))

    def record(self, step: Step) -> None:
        """Remember how the judged drafts turned out."""
        if step.scores is None or step.drafter is not self._info:
            return
        assert self._calibrator is not None, "scores come from a calibrator"
        judged = [row.proposed > 0 and row.accepted is not None for row in step.committing]
        rows = list(compress(step.committing, judged))
        survival = step.scores.survival[judged]
        admitted = np.array([row.admitted for row in rows], np.int64)
        accepted = np.array([row.accepted for row in rows], np.int64)
        for block, sent, kept in zip(survival, admitted.tolist(), accepted.tolist(), strict=True):
            self._history.record(block, sent, kept)
        self._calibrator.record(
            [row.draft for row in rows], _modes(rows), survival, accepted, admitted
        )


def _modes(rows: Iterable[Row]) -> list[VerificationMode]:
    return [row.sequence.request.sampling.mode for row in rows]


def _draft_row(row: Row) -> DraftRow:
    sequence = row.sequence
    context = sequence.draft_context
    return DraftRow(
        key=sequence.key,
        base_committed_len=context.committed_len,
        tokens=tuple(sequence.tokens[context.committed_len :]),
        features=context.features,
        num_draft=row.max_draft,
        sampling=sequence.request.sampling,
    )
