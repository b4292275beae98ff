"""The loop that moves the engine: every step from `begin` to `commit`, and what to do in between
when a worker does not answer.
"""

import asyncio
import logging
from dataclasses import dataclass
from time import perf_counter

from dspark.core.cost import StepCost
from dspark.core.errors import (
    ConflictingStepError,
    DSparkError,
    MessageTooLargeError,
    OverloadedError,
    StaleStepError,
    WorkerUnavailableError,
)
from dspark.core.refresh import CostRefresher
from dspark.core.types import (
    DraftBatch,
    DraftReply,
    SequenceKey,
    TargetInfo,
    VerifyBatch,
    VerifyReply,
)
from dspark.engine.calibrator import CalibrationStatus, Stream
from dspark.engine.engine import Engine
from dspark.engine.events import GateStatus, StepStart
from dspark.engine.ports import DrafterPort, VerifierPort
from dspark.engine.request import Request
from dspark_services.scheduler.drafter_link import DrafterLink, DrafterTiming, Recall
from dspark_services.scheduler.handshake import (
    FIRST_RETRY_SECONDS,
    LONGEST_RETRY_SECONDS,
    check_same_target,
)
from dspark_services.scheduler.observer import NullObserver, Observer, StepTiming
from dspark_services.scheduler.step_time import step_time
from dspark_services.scheduler.stopwatch import Stopwatch
from dspark_services.scheduler.streams import EventStream, StreamTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverStatus:
    """A snapshot for readiness and status pages."""

    verifier_ready: bool
    drafter_ready: bool | None  # None: configured to run without
    waiting: int
    running: int
    paused: bool
    gate: GateStatus


class Driver:
    """Owns the engine: requests come in through `submit`, their events go out as they happen.

    Single-threaded: `submit`, `cancel` and `run` belong to one event loop.
    """

    def __init__(
        self,
        engine: Engine,
        target: TargetInfo,
        verifier: VerifierPort,
        drafter: DrafterPort | None,
        *,
        verifier_deadline: float,
        max_waiting: int,
        time_drafter: DrafterTiming | None = None,
        refresh_cost: bool = False,
        recall: Recall | None = None,
        observer: Observer | None = None,
    ) -> None:
        """``verifier_deadline`` [s]: longest absence of the verifier that requests sit out.
        ``refresh_cost``: keep the engine's cost surface current from the steps that are served.
        """
        self._engine = engine
        self._target = target
        self._verifier = verifier
        self._verifier_deadline = verifier_deadline
        self._max_waiting = max_waiting
        self._refresher: CostRefresher | None = None
        if refresh_cost and engine.cost is not None:
            self._refresher = CostRefresher(engine.cost)
        self._observer = observer or NullObserver()
        self._streams = StreamTable()
        self._wake = asyncio.Event()
        self._turn = asyncio.Lock()  # held by a step, or by what must not run beside one
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._verifier_ready = True
        self._accounting: asyncio.Task[None] | None = None  # of the step committed last
        self._link: DrafterLink | None = None
        if drafter is not None:
            self._link = DrafterLink(
                engine,
                drafter,
                lambda: self._target,
                self._turn,
                time_drafter=time_drafter,
                recall=recall,
                on_cost=self._use_cost,
            )

    # --- For the API -------------------------------------------------------------------------

    def submit(self, request: Request) -> EventStream:
        """Queue a request.

        Raises:
            InvalidRequestError: it could never be served.
            OverloadedError: too many requests wait already.
            WorkerUnavailableError: the verifier has been gone for longer than the deadline.
        """
        if self._engine.num_waiting >= self._max_waiting:
            raise OverloadedError(f"{self._max_waiting} requests are waiting already; retry later")
        if not self._verifier_ready:
            raise WorkerUnavailableError("the verifier is gone; retry when it has returned")
        stream = self._streams.open(self._engine.add(request))
        self._wake.set()
        return stream

    def cancel(self, key: SequenceKey) -> None:
        """Drop a request, finished or not; the workers forget it with the next step."""
        self._streams.close(key)
        self._engine.cancel(key)
        self._wake.set()

    async def pause(self) -> None:
        """Begin no step until `resume`; returns when the one in flight is committed and counted.
        Requests are queued meanwhile."""
        self._resumed.clear()
        async with self._turn:
            await self._settle()

    def resume(self) -> None:
        """Step again after `pause`."""
        self._resumed.set()

    @property
    def target(self) -> TargetInfo:
        """What the verifier said of itself when it was met last."""
        return self._target

    @property
    def cost(self) -> StepCost | None:
        """The cost profile that plans are made with."""
        return self._engine.cost

    @property
    def calibration(self) -> dict[Stream, CalibrationStatus]:
        """How well confidences predict, by mode and source. Takes milliseconds."""
        return self._engine.calibration

    @property
    def status(self) -> DriverStatus:
        return DriverStatus(
            verifier_ready=self._verifier_ready,
            drafter_ready=None if self._link is None else self._link.ready,
            waiting=self._engine.num_waiting,
            running=self._engine.num_running,
            paused=not self._resumed.is_set(),
            gate=self._engine.gate,
        )

    # --- The loop ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Step for ever. Returns only by cancellation or by an error, which is a defect."""
        if self._link is not None:
            self._link.open()
        try:
            while True:
                await self._resumed.wait()
                async with self._turn:
                    clock = Stopwatch()
                    start = self._engine.begin()
                    clock.lap("plan")
                    if start is not None:
                        await self._step(start, clock)
                if start is None:
                    self._wake.clear()
                    await self._settle()
                    await self._wake.wait()
        finally:
            if self._accounting is not None:
                self._accounting.cancel()
            if self._link is not None:
                self._link.close()

    async def _step(self, start: StepStart, clock: Stopwatch) -> None:
        await self._fetch_features(start)
        clock.lap("fetch")
        drafts_wanted = self._engine.draft_batch()
        clock.lap("plan")
        drafts = await self._draft(drafts_wanted) if drafts_wanted is not None else None
        clock.lap("draft")
        batch = self._engine.plan(drafts)
        clock.lap("plan")
        verdicts = await self._verify(batch)
        clock.lap("verify")
        await self._settle()
        if verdicts is None:
            self._engine.verifier_lost()
            return
        try:
            events = self._engine.commit(verdicts)
        except (StaleStepError, ConflictingStepError) as error:
            log.error("step %d refused: %s", batch.step, error)
            self._observer.on_fallback("refused-step")
            self._engine.verifier_lost()
            return
        self._streams.deliver(events)
        clock.lap("commit")
        timing = clock.timing(drafts, verdicts)
        usual = drafts is not None or drafts_wanted is None  # else it waited for nothing
        if usual and self._refresher is not None:
            self._engine.took(timing.total)
        self._accounting = asyncio.create_task(
            self._account(timing, drafts_wanted if usual else None, usual=usual)
        )

    async def _account(
        self, timing: StepTiming, drafting: DraftBatch | None, *, usual: bool
    ) -> None:
        """What a step leaves to be written down and learnt, while the next one waits for its first
        worker."""
        outcome = self._engine.account()
        self._observer.on_step(outcome, timing)
        if usual and self._refresher is not None:
            block_size = 0 if self._link is None else self._link.block_size
            step = step_time(outcome.stats, timing, drafting, block_size)
            cost = None if step is None else self._refresher.observe(step)
            if cost is not None:
                self._engine.use_cost(cost)

    async def _settle(self) -> None:
        """See that the last step's accounts are written, as they are by now; an error in them is a
        defect, and ends the loop."""
        if self._accounting is not None:
            await self._accounting

    def _use_cost(self, cost: StepCost) -> None:
        """A surface that was measured, and not learned from steps."""
        self._engine.use_cost(cost)
        if self._refresher is not None:
            self._refresher = CostRefresher(cost)

    # --- Drafter: fail open ------------------------------------------------------------------

    async def _draft(self, batch: DraftBatch) -> DraftReply | None:
        assert self._link is not None, "the engine drafts only with a drafter attached"
        drafts = await self._link.draft(batch)
        if drafts is None:
            self._observer.on_fallback("drafter")
        return drafts

    async def _fetch_features(self, start: StepStart) -> None:
        """Rows whose features do not come are left out of this step's draft."""
        for fetch in start.fetch:
            try:
                features = await self._verifier.features(fetch.key, fetch.start, fetch.stop)
            except WorkerUnavailableError as error:
                log.debug("no features: %s", error)
                return  # each further fetch would wait as long; `_verify` deals with it
            except DSparkError as error:
                log.debug("no features: %s", error)
            else:
                self._engine.supply(fetch.key, features)

    # --- Verifier: fail safe -----------------------------------------------------------------

    async def _verify(self, batch: VerifyBatch) -> VerifyReply | None:
        """The verdicts; None when the verifier lost its state, or was gone past the deadline, or
        when a row cannot be sent, whose request then fails alone."""
        deadline = perf_counter() + self._verifier_deadline
        delay = FIRST_RETRY_SECONDS
        while True:
            try:
                return await self._verifier.verify(batch)
            except MessageTooLargeError as error:
                if error.key is None:
                    raise
                log.warning("a request is given up: %s", error)
                self._streams.fail(error.key, error)
                self._engine.cancel(error.key)
                return None
            except WorkerUnavailableError as error:
                log.warning("step %d waits for the verifier: %s", batch.step, error)
                self._observer.on_fallback("verifier")
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)
            if not await self._same_verifier(deadline):
                return None
            # The same process has the verdicts of a step it has seen: sending it again is safe.

    async def _same_verifier(self, deadline: float) -> bool:
        """Wait until the verifier answers; False if it is a new one or came back too late."""
        delay = FIRST_RETRY_SECONDS
        on_time = True
        while True:
            if on_time and perf_counter() >= deadline:
                on_time = False
                self._give_up_requests()
            try:
                info = await self._verifier.handshake()
                break
            except WorkerUnavailableError as error:
                log.debug("verifier not back: %s", error)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)
        check_same_target(info, self._target)
        self._verifier_ready = True
        same = info.incarnation == self._target.incarnation
        self._target = info
        return same and on_time

    def _give_up_requests(self) -> None:
        self._verifier_ready = False
        error = WorkerUnavailableError(
            f"the verifier has been gone for {self._verifier_deadline:g} s; retry later"
        )
        for key in self._streams.fail_all(error):
            self._engine.cancel(key)
