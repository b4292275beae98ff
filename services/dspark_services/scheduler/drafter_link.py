"""A drafter for as long as one answers and fits; plain decoding in between."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dspark.core.cost import StepCost
from dspark.core.errors import DSparkError, WorkerUnavailableError
from dspark.core.types import DraftBatch, DrafterInfo, DraftReply, TargetInfo
from dspark.engine.calibrator import Calibrator
from dspark.engine.engine import Engine
from dspark.engine.events import GateState
from dspark.engine.ports import DrafterPort
from dspark_services.scheduler.handshake import (
    FIRST_RETRY_SECONDS,
    LONGEST_RETRY_SECONDS,
    check_drafter_fits,
)

log = logging.getLogger(__name__)

DrafterTiming = Callable[[StepCost, DrafterInfo, asyncio.Lock], Awaitable[StepCost]]
"""Add to a surface the drafts of a drafter that has just been met, timed call by call between
steps: each call takes the lock."""

Recall = Callable[[DrafterInfo], Awaitable[Calibrator]]
"""What is known about the confidences of a drafter that has been met."""


class DrafterLink:
    """Attaches a drafter to the engine and, when it fails, looks for it until it is back."""

    def __init__(
        self,
        engine: Engine,
        drafter: DrafterPort,
        target: Callable[[], TargetInfo],
        turn: asyncio.Lock,
        *,
        time_drafter: DrafterTiming | None,
        recall: Recall | None,
        on_cost: Callable[[StepCost], None],
    ) -> None:
        """``target``: the one that is served now. ``turn`` is held by every step. ``time_drafter``:
        how to learn what drafts cost, where the engine does not know yet; ``on_cost`` is told."""
        self._engine = engine
        self._drafter = drafter
        self._target = target
        self._turn = turn
        self._time_drafter = time_drafter
        self._recall = recall
        self._on_cost = on_cost
        self._attaching: asyncio.Task[None] | None = None
        self.ready = False
        self.block_size = 0  # of the drafter that was attached last

    def open(self) -> None:
        """Attach the drafter as soon as it answers, in a task of its own."""
        self._attaching = asyncio.create_task(self._attach())

    def close(self) -> None:
        if self._attaching is not None:
            self._attaching.cancel()

    async def draft(self, batch: DraftBatch) -> DraftReply | None:
        """None if no usable answer came; then the drafter is detached until it is met again."""
        try:
            return await self._drafter.draft(batch)
        except DSparkError as error:
            log.warning("decoding without drafts: %s", error)
            self.ready = False
            self._engine.attach_drafter(None)
            self.open()
            return None

    async def _attach(self) -> None:
        delay = FIRST_RETRY_SECONDS
        refusal = ""
        while True:
            try:
                info = await self._meet()
                break
            except WorkerUnavailableError as error:
                log.debug("drafter not back: %s", error)
            except DSparkError as error:
                # It answered, but does not fit. Another may take its place, so go on asking.
                if str(error) != refusal:
                    refusal = str(error)
                    log.warning("decoding without drafts: %s", refusal)
            await asyncio.sleep(delay)
            delay = min(2 * delay, LONGEST_RETRY_SECONDS)
        self.ready = True
        log.info("drafter attached", extra={"drafter": info.name, "incarnation": info.incarnation})
        if self._engine.gate.state is GateState.NO_DATA:
            log.warning("decoding without drafts: %s", self._engine.gate.reason)

    async def _meet(self) -> DrafterInfo:
        info = await self._drafter.handshake()
        check_drafter_fits(info, self._target())
        cost = self._engine.cost
        if self._time_drafter is not None and cost is not None:
            self._engine.profiling_drafter()
            try:
                cost = await self._time_drafter(cost, info, self._turn)
            finally:
                self._engine.attach_drafter(None)  # it is being timed no more
            self._time_drafter = None
            self._on_cost(cost)
        calibrator = None if self._recall is None else await self._recall(info)
        self._engine.attach_drafter(info, calibrator)
        self.block_size = info.block_size
        return info
