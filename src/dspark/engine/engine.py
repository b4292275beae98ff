"""The engine: admits requests and turns the workers' replies into committed tokens, without I/O.

A driver runs one step as

    start = engine.begin()
    for fetch in start.fetch:
        engine.supply(fetch.key, <features from the verifier>)
    batch = engine.draft_batch()
    verify_batch = engine.plan(<the drafter's reply to batch> or None)
    events = engine.commit(<the verifier's reply to verify_batch>)
    engine.took(<seconds>)  # may be left out
    outcome = engine.account()  # may wait until after the next `begin`

`add`, `cancel`, `attach_drafter` and `use_cost` may be called at any time, also between these.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from dspark.core.cost import StepCost
from dspark.core.planner import Planner
from dspark.core.types import (
    DraftBatch,
    DrafterInfo,
    DraftReply,
    OpenSequence,
    RowStatus,
    SequenceKey,
    TargetInfo,
    Verdict,
    VerifyBatch,
    VerifyReply,
    VerifyRow,
)
from dspark.engine.admission import Admission, Limits
from dspark.engine.calibrator import CalibrationStatus, Calibrator, Stream
from dspark.engine.drafting import Drafting
from dspark.engine.drafts import cut
from dspark.engine.events import GateStatus, SequenceEvent, StepOutcome, StepStart
from dspark.engine.repeats import Repeats
from dspark.engine.request import Request
from dspark.engine.sequence import Sequence
from dspark.engine.stats import summarise
from dspark.engine.step import Row, Step
from dspark.engine.verdicts import checked_verdicts


class Engine:
    """Continuous batching with speculative decoding over one verifier and at most one drafter.

    `incarnation` names this scheduler process in every sequence key. Without a `cost` profile
    nothing is drafted, and `gate` says so.
    """

    def __init__(
        self,
        *,
        incarnation: int,
        target: TargetInfo,
        planner: Planner,
        cost: StepCost | None,
        limits: Limits,
        cap_accept_every: int = 0,
        lookup: bool = False,
    ) -> None:
        """`cap_accept_every` steps: once in so many, a few rows are verified whole, to measure
        what planning destroys and spares; 0: never. `lookup`: draft what repeats itself, beside a
        drafter or without one."""
        self._incarnation = incarnation
        self._target = target
        self._planner = planner
        self._cost = cost
        self._limits = limits
        self._admission = Admission(target, limits.max_running)
        repeats = Repeats() if lookup and planner.draft_length(1) else None
        self._drafting = Drafting(planner, cost, target.vocab_size, cap_accept_every, repeats)
        self._running: dict[SequenceKey, Sequence] = {}  # in order of admission
        self._closes: set[SequenceKey] = set()  # the verifier has not confirmed these
        self._num_sequences = 0
        self._num_steps = 0
        self._step: Step | None = None
        self._last: Step | None = None  # committed
        self._to_account: Callable[[], StepOutcome] | None = None  # of the last step

    def attach_drafter(
        self, info: DrafterInfo | None, calibrator: Calibrator | None = None
    ) -> None:
        """Ask this drafter from now on; None: ask nobody until the next call. A new incarnation
        starts empty, with a `calibrator` that may know the drafter already.

        Raises DrafterError if the drafter's calibration does not cover its block.
        """
        self._drafting.attach(info, calibrator, self._running.values())

    def profiling_drafter(self) -> None:
        """Say, until one is attached, that a drafter was met and is being timed."""
        self._drafting.profiling()

    def use_cost(self, cost: StepCost) -> None:
        """Plan with another cost surface from the next step on."""
        self._cost = cost
        self._drafting.use_cost(cost)

    def add(self, request: Request) -> SequenceKey:
        """Queue a request. Raises InvalidRequestError if it could never be served."""
        key = SequenceKey(self._incarnation, self._num_sequences)
        self._admission.add(Sequence(key, request, self._target.max_context))
        self._num_sequences += 1
        return key

    def cancel(self, key: SequenceKey) -> None:
        """Forget a sequence, at any time; no event of it follows. Unknown keys are ignored."""
        self._admission.withdraw(key)
        if key in self._running:
            self._retire(self._running[key])

    @property
    def has_work(self) -> bool:
        """Whether `begin` has something to do: sequences, or closes the workers have not heard."""
        return bool(self._running or self.num_waiting or self._closes or self._drafting.has_closes)

    @property
    def num_waiting(self) -> int:
        return self._admission.num_waiting

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def free_blocks(self) -> int:
        """KV blocks of the verifier that no running sequence has reserved."""
        return self._admission.free_blocks

    @property
    def cost(self) -> StepCost | None:
        """What the engine believes steps cost."""
        return self._cost

    @property
    def calibration(self) -> dict[Stream, CalibrationStatus]:
        """How well confidences predict, by mode and source. Takes milliseconds."""
        return self._drafting.calibration

    @property
    def gate(self) -> GateStatus:
        """Whether the engine drafts at present, and why."""
        return self._drafting.status

    def begin(self) -> StepStart | None:
        """Admit requests, fix the prefill chunks, decide who drafts. None: nothing to do."""
        if self._step is not None:
            raise RuntimeError("begin() was called with a step in flight: commit or abandon it")
        if not self.has_work:
            return None
        for sequence in self._admission.admit():
            self._running[sequence.key] = sequence
        self._num_steps += 1
        self._step = Step(self._num_steps, self._select_rows(), self._cost)
        fetch = self._drafting.choose(self._step, self._limits.max_batch_tokens)
        return StepStart(self._step.number, fetch)

    def supply(self, key: SequenceKey, features: bytes) -> None:
        """Answer a fetch of `begin`. A fetch that failed is left out: that row does not draft."""
        if key in self._running:
            self._running[key].draft_context.supply(features)

    def draft_batch(self) -> DraftBatch | None:
        """What to send to the drafter in this step; None: nothing, go on with `plan(None)`."""
        step = self._current_step(planned=False)
        self._drop_cancelled(step)
        return self._drafting.batch(step, idle=not self._running)

    def plan(self, reply: DraftReply | None) -> VerifyBatch:
        """Choose how much of each draft to verify. None (skipped, late, failed): plain decoding.

        Raises StaleStepError if the reply belongs to another step.
        """
        step = self._current_step(planned=False)
        self._drafting.receive(step, reply)
        self._drop_cancelled(step)
        self._admit_drafts(step)
        step.verifier_closes = tuple(sorted(self._closes))
        step.planned = True
        rows = tuple(self._verify_row(row) for row in step.rows)
        return VerifyBatch(step.number, rows, step.verifier_closes)

    def commit(self, reply: VerifyReply) -> tuple[SequenceEvent, ...]:
        """Replay the verdicts token by token.

        Raises StaleStepError or ConflictingStepError, before changing anything, when the reply
        does not fit the planned batch; `verifier_lost` recovers from that.
        """
        step = self._current_step(planned=True)
        if self._to_account is not None:
            raise RuntimeError("the step before was not accounted for")
        verdicts = checked_verdicts(step, reply)
        self._step, self._last = None, step
        self._closes.difference_update(step.verifier_closes)
        events = []
        for row in step.rows:
            verdict = verdicts.get(row.sequence.key)
            if row.sequence.key not in self._running:
                continue  # cancelled while the verifier was at work
            if verdict is None or verdict.status is RowStatus.UNKNOWN:
                row.sequence.reopen()
                step.reopened += 1
            elif event := self._commit_row(row, verdict):
                events.append(event)
        load = {"waiting": self.num_waiting, "running": self.num_running}
        summary = partial(summarise, step, reply, gate=self.gate, **load)
        self._to_account = lambda: StepOutcome(step.number, tuple(events), summary())
        return tuple(events)

    def account(self) -> StepOutcome:
        """Learn from the step committed last, and sum it up. Once for each step, before the next
        one is committed; no client has to wait for it.
        """
        if self._last is None or self._to_account is None:
            raise RuntimeError("account() was called without a step to account for")
        outcome, self._to_account = self._to_account(), None
        self._drafting.record(self._last)
        return outcome

    def took(self, seconds: float) -> None:
        """Say, before the next one begins, how long the step committed last took, from `begin` on,
        where nothing unusual held it up. It helps to decide, from history, whether the steps to
        come draft.
        """
        if self._step is not None:
            raise RuntimeError("took() was called with a step in flight: it is about the last one")
        if self._last is not None:
            self._drafting.took(self._last, seconds)

    def verifier_lost(self) -> None:
        """Abandon the step in flight; every sequence is opened again from its committed tokens."""
        self._step = None
        for sequence in self._running.values():
            sequence.reopen()

    def _select_rows(self) -> list[Row]:
        """Every decoding sequence, and prefill chunks, first come first served."""
        budget = self._limits.max_prefill_tokens
        rows = []
        for sequence in self._running.values():
            if sequence.decoding:
                rows.append(Row(sequence, 1))
            elif budget > 0:
                chunk = min(sequence.pending, budget)
                budget -= chunk
                rows.append(Row(sequence, chunk))
        return rows

    def _admit_drafts(self, step: Step) -> None:
        """The only place that sets how much of a draft is verified; the planner alone decides."""
        committing = step.committing
        proposed = np.array([row.proposed for row in committing], np.int64)
        asked = sum(row.asked for row in step.rows)
        load = step.load(proposed, step.capacity, drafter_rows=asked)
        if proposed.any() and step.cost is not None:  # without, the gate let nothing be drafted
            step.scores = self._drafting.scores(step)
            lengths = self._planner.plan(step.scores, load, step.cost)
            for row, length in zip(committing, lengths.tolist(), strict=True):
                row.planned = length
            self._drafting.planned(step)
        admitted = sum(row.admitted for row in committing)
        step.head_rows, step.context_tokens = load.requests + admitted, load.context_tokens
        step.planned_tokens = load.base_tokens + admitted

    def _verify_row(self, row: Row) -> VerifyRow:
        sequence = row.sequence
        return VerifyRow(
            key=sequence.key,
            base_committed_len=sequence.committed_len,
            num_pending=row.num_pending,
            open=None
            if sequence.opened
            else OpenSequence(tuple(sequence.tokens), sequence.request.sampling, sequence.max_len),
            draft=cut(row.draft, row.admitted) if row.draft is not None else None,
            want_features=self._drafting.wants_features(row),
        )

    def _commit_row(self, row: Row, verdict: Verdict) -> SequenceEvent | None:
        sequence = row.sequence
        sequence.computed(verdict)
        if verdict.next_token is None:
            self._drafting.follow(sequence)
            return None  # prefill goes on
        row.accepted = verdict.accepted
        drafted = [] if row.draft is None else row.draft.tokens[: verdict.accepted].tolist()
        tokens = sequence.commit([*drafted, verdict.next_token])
        row.committed = len(tokens)
        self._drafting.follow(sequence)
        sequence.count_draft(row.proposed, row.admitted, row.kept)
        if sequence.finish is not None:
            self._retire(sequence)
        return SequenceEvent(
            key=sequence.key,
            tokens=tokens,
            text=sequence.take_text(),
            admitted=row.admitted,
            accepted=row.kept,
            finish=sequence.finish,
            usage=sequence.usage() if sequence.finish is not None else None,
        )

    def _retire(self, sequence: Sequence) -> None:
        """The sequence is over: give back what it reserved, and tell both workers in time."""
        del self._running[sequence.key]
        self._admission.release(sequence)
        self._closes.add(sequence.key)
        self._drafting.close(sequence)

    def _drop_cancelled(self, step: Step) -> None:
        step.rows = [row for row in step.rows if row.sequence.key in self._running]

    def _current_step(self, *, planned: bool) -> Step:
        if self._step is None or self._step.planned is not planned:
            raise RuntimeError("a step runs begin, draft_batch, plan, commit, in this order")
        return self._step
