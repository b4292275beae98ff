"""The drafts of a step: who drafts, what the drafter must be told, what its reply is worth.

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
)
from dspark.engine.calibrator import CalibrationStatus, Calibrator, Stream
from dspark.engine.drafts import is_usable
from dspark.engine.events import FeatureFetch, GateState, GateStatus
from dspark.engine.gate import DraftGate
from dspark.engine.history import History
from dspark.engine.repeats import Repeats
from dspark.engine.sequence import Sequence
from dspark.engine.sources import Sources
from dspark.engine.step import Row, Step

CAP_ACCEPT_ROWS = 4  # in a step: a busy batch then pays for a few rows, not for all of them


class Drafting:
    """Everything the engine knows about its drafter, attached or not, and its own drafts."""

    def __init__(
        self,
        planner: Planner,
        cost: StepCost | None,
        vocab_size: int,
        cap_accept_every: int,
        repeats: Repeats | None,
    ) -> None:
        self._planner = planner
        self._vocab_size = vocab_size
        self._cap_accept_every = cap_accept_every
        self._gate = DraftGate(planner, cost)
        self._info: DrafterInfo | None = None
        self._incarnation: int | None = None  # of the last drafter attached
        self._sources = Sources(planner, repeats)
        self._history = History(self._sources.widest)
        self._closes: set[SequenceKey] = set()
        self._open_gate()

    @property
    def status(self) -> GateStatus:
        return self._gate.status

    @property
    def calibration(self) -> dict[Stream, CalibrationStatus]:
        """See `Engine.calibration`."""
        return self._sources.calibration

    @property
    def has_closes(self) -> bool:
        return self._info is not None and bool(self._closes)

    def attach(
        self,
        info: DrafterInfo | None,
        calibrator: Calibrator | None,
        running: Iterable[Sequence],
    ) -> None:
        """See `Engine.attach_drafter`."""
        if info is not None and info.incarnation != self._incarnation:
            self._sources.renew(calibrator or Calibrator(info))
            self._incarnation = info.incarnation
            self._history = History(self._sources.widest)
            self._closes.clear()
            for sequence in running:
                sequence.forget_drafter()
        self._info = info
        self._open_gate()

    def _open_gate(self) -> None:
        if self._info is None and not self._sources.has_lookup:
            self._gate.close("no drafter attached")
        elif self._planner.draft_length(self._sources.widest) == 0:
            self._gate.close(f"planner {self._planner.name} never drafts")
        else:
            self._gate.open(drafter=self._info is not None)

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
        if tokens and usual and step.decodes:
            self._gate.took(
                drafted=step.drafts, requests=len(step.rows), tokens=tokens, seconds=seconds
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
        for row in step.rows:
            if row.decoding:
                self._sources.choose(row, self._info)
        able = [row for row in step.rows if row.max_draft]
        if not able:
            return ()
        room = max(max_batch_tokens - step.base_tokens, 0)
        asked = sum(row.found is None for row in able)
        load = step.load(step.caps(), room, drafter_rows=asked)
        allowance = self._gate.decide(self._history, load)
        for row in able[allowance.rows :]:
            row.max_draft, row.found = 0, None
        step.capacity = allowance.capacity
        if allowance.rows and self._gate.status.state.pays:
            self._shadow(step.number, able, room)
        return tuple(
            FeatureFetch(row.sequence.key, context.wanted_start, row.sequence.computed_len)
            for row in able[: allowance.rows]
            if row.found is None and (context := row.sequence.draft_context).has_gap
        )

    def follow(self, sequence: Sequence) -> None:
        """The target went on with a sequence."""
        self._sources.follow(sequence)

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
            self._info is not None
            and self._gate.likely_to_draft
            and not row.sequence.draft_context.has_gap
            and row.sequence.remaining > 2  # one for this step's token, two for a draft to pay
        )

    def batch(self, step: Step, *, idle: bool) -> DraftBatch | None:
        """The step's draft batch. Closes wait for company, unless the engine is `idle`."""
        if self._info is None:
            return None
        rows = [
            row
            for row in step.rows
            if row.max_draft and row.found is None and not row.sequence.draft_context.has_gap
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
                row.draft = row.found
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
        confidences = self._sources.confidences(step.committing)
        scores = CurrentScores(np.cumprod(confidences, axis=1, dtype=np.float64))
        return DeterminedScores.of(scores, step.modes) if step.determined else scores

    def planned(self, step: Step) -> None:
        """The plan of a step that drafted is made."""
        self._gate.planned(trimmed=any(row.planned < row.proposed for row in step.committing))

    def record(self, step: Step) -> None:
        """Remember how the judged drafts turned out."""
        if step.scores is None or step.scores.survival.shape[1] != self._sources.widest:
            return  # nothing was drafted, or the blocks of another drafter are of another size
        judged = [self._is_judged(step, row) for row in step.committing]
        rows, survival = list(compress(step.committing, judged)), step.scores.survival[judged]
        admitted = np.array([row.admitted for row in rows], np.int64)
        accepted = np.array([row.accepted for row in rows], np.int64)
        for block, sent, kept in zip(survival, admitted.tolist(), accepted.tolist(), strict=True):
            self._history.record(block, sent, kept)
        self._sources.record(rows, survival, accepted, admitted)

    def _is_judged(self, step: Step, row: Row) -> bool:
        """Whether the target said something of a draft whose source is still there."""
        there = row.found is not None or step.drafter is self._info
        return there and row.proposed > 0 and row.accepted is not None


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
