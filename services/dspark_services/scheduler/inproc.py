"""The engine's two ports onto workers in this very process: no wire, one thread for both models."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from dspark.core.errors import WorkerUnavailableError
from dspark.core.types import (
    DraftBatch,
    DrafterInfo,
    DraftReply,
    ProfileShape,
    SequenceKey,
    TargetInfo,
    VerifyBatch,
    VerifyReply,
)
from dspark.modeling.draft_worker import DraftWorker
from dspark.modeling.target_worker import TargetWorker
from dspark_services.compute import ComputeThread

Reply = TypeVar("Reply")


class InprocDrafter:
    """DrafterPort onto a DraftWorker."""

    def __init__(self, worker: DraftWorker, thread: ComputeThread, reply_timeout: float) -> None:
        self._worker = worker
        self._thread = thread
        self._reply_timeout = reply_timeout

    async def handshake(self) -> DrafterInfo:
        return self._worker.info

    async def draft(self, batch: DraftBatch) -> DraftReply:
        return await _within(self._reply_timeout, self._thread, self._worker.draft, batch)

    async def close(self) -> None:
        await self._thread.run(lambda: None)  # the call in progress ends first


class InprocVerifier:
    """VerifierPort onto a TargetWorker."""

    def __init__(self, worker: TargetWorker, thread: ComputeThread, reply_timeout: float) -> None:
        self._worker = worker
        self._thread = thread
        self._reply_timeout = reply_timeout

    async def handshake(self) -> TargetInfo:
        return self._worker.info

    async def verify(self, batch: VerifyBatch) -> VerifyReply:
        return await _within(self._reply_timeout, self._thread, self._worker.verify, batch)

    async def features(self, key: SequenceKey, start: int, stop: int) -> bytes:
        return await self._thread.run(self._worker.features, key, start, stop)

    async def profile(self, shapes: list[ProfileShape], repeats: int) -> list[float]:
        return await self._thread.run(self._worker.profile, shapes, repeats)

    async def close(self) -> None:
        await self._thread.run(lambda: None)  # the call in progress ends first


async def _within(
    seconds: float, thread: ComputeThread, function: Callable[[Any], Reply], batch: Any
) -> Reply:
    """The reply, or WorkerUnavailableError after ``seconds``; the thread's late one is dropped."""
    try:
        return await asyncio.wait_for(thread.run(function, batch), seconds)
    except TimeoutError:
        raise WorkerUnavailableError(
            f"the worker did not finish step {batch.step} within {seconds:g} s"
        ) from None
