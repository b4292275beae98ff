"""The client end of one long-lived bidirectional stream that carries a request and reply a step."""

import asyncio
import contextlib
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import grpc

from dspark.core.errors import DSparkError, WorkerUnavailableError
from dspark.wire.status import error_of
from dspark.wire.transport import check_size


class _Numbered(Protocol):
    @property
    def step(self) -> int: ...

    def ByteSize(self) -> int: ...


Request = TypeVar("Request", bound=_Numbered)
Reply = TypeVar("Reply", bound=_Numbered)


class StepStream(Generic[Request, Reply]):
    """Matches replies to calls by step, so that a late reply is never taken for the current one.

    A stream ends with the process at its other end, and whoever answers next may be another one. So
    the handshake opens it (`open`), and if it breaks while nobody waits, the next call fails once:
    its caller then shakes hands again, before anything is sent to the new process. A background
    task reads: giving up on one reply must not end the stream, as cancelling a read in gRPC would.
    """

    def __init__(
        self,
        open_call: Callable[[], "grpc.aio.StreamStreamCall[Request, Reply]"],
        peer: str,
        reply_timeout: float,
    ) -> None:
        self._open_call = open_call
        self._peer = peer
        self._reply_timeout = reply_timeout  # seconds
        self._call: grpc.aio.StreamStreamCall[Request, Reply] | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._unnoticed: WorkerUnavailableError | None = None  # it broke, and no call was told

    def open(self) -> "grpc.aio.StreamStreamCall[Request, Reply]":
        """The stream, opened if it is not; how the last one ended is forgotten."""
        self._unnoticed = None
        if self._call is None:
            self._call = self._open_call()
            self._reader = asyncio.create_task(self._read(self._call))
        return self._call

    def check(self) -> None:
        """Raise WorkerUnavailableError, once, if the stream broke and no call was told."""
        error, self._unnoticed = self._unnoticed, None
        if error is not None:
            raise error

    async def exchange(self, request: Request) -> Reply:
        """Send one request and wait for the reply of the same step.

        Raises:
            MessageTooLargeError: the request is over the limit; nothing was sent.
            WorkerUnavailableError: no reply within the time limit, or the stream broke.
            DSparkError: the error the worker answered with.
        """
        check_size(request, f"step {request.step} for the {self._peer}")
        self.check()
        call = self.open()
        waiter: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[request.step] = waiter
        try:
            async with asyncio.timeout(self._reply_timeout):
                # A write fails only with its stream, and the reader knows the reason.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await call.write(request)
                return await waiter
        except TimeoutError:
            raise WorkerUnavailableError(
                f"{self._peer}: no reply to step {request.step} within {self._reply_timeout:g} s"
            ) from None
        finally:
            del self._waiting[request.step]

    async def close(self) -> None:
        if self._call is not None and self._reader is not None:
            self._call.cancel()
            await self._reader

    async def _read(self, call: "grpc.aio.StreamStreamCall[Request, Reply]") -> None:
        error: DSparkError = WorkerUnavailableError(f"{self._peer}: the stream was closed")
        try:
            async for reply in call:
                waiter = self._waiting.get(reply.step)
                if waiter is not None and not waiter.done():
                    waiter.set_result(reply)
        except grpc.aio.AioRpcError as failure:
            error = error_of(failure, self._peer)
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
        self._call = None
        if not self._waiting:
            self._unnoticed = WorkerUnavailableError(f"the stream broke while idle: {error}")
        for waiter in self._waiting.values():
            if not waiter.done():
                waiter.set_exception(error)
