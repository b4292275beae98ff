"""What the engine's driver needs from outside. Two implementations each: gRPC, in process."""

from typing import Protocol

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


class DrafterPort(Protocol):
    """Raises WorkerUnavailableError when the drafter cannot answer; the caller then fails open."""

    async def handshake(self) -> DrafterInfo: ...

    async def draft(self, batch: DraftBatch) -> DraftReply: ...


class VerifierPort(Protocol):
    """Raises WorkerUnavailableError when it cannot answer; the same batch may be resent."""

    async def handshake(self) -> TargetInfo: ...

    async def verify(self, batch: VerifyBatch) -> VerifyReply: ...

    async def features(self, key: SequenceKey, start: int, stop: int) -> bytes: ...

    async def profile(self, shapes: list[ProfileShape], repeats: int) -> list[float]: ...
