"""Real workers behind real ports, in the test's own process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Literal

from dspark_services.drafter.servicer import DrafterServicer
from dspark_services.scheduler.clients import GrpcDrafter, GrpcVerifier
from dspark_services.scheduler.inproc import InprocDrafter, InprocVerifier
from dspark_services.verifier.servicer import VerifierServicer
from dspark_services.worker_thread import WorkerThread

from dspark.engine.ports import DrafterPort, VerifierPort
from dspark.wire.dspark.v1.drafter_pb2_grpc import add_DrafterServicer_to_server
from dspark.wire.dspark.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from dspark.wire.server import serve

Transport = Literal["grpc", "inproc"]


@asynccontextmanager
async def drafter_port(
    transport: Transport, worker: Any, reply_timeout: float = 10.0
) -> AsyncIterator[DrafterPort]:
    """A DrafterPort onto ``worker``, which is a DraftWorker or behaves like one."""
    thread = WorkerThread("drafter")
    async with AsyncExitStack() as stack:
        if transport == "inproc":
            yield InprocDrafter(worker, thread, reply_timeout)
            return
        servicer = DrafterServicer(worker, thread)
        port = await stack.enter_async_context(
            serving(lambda server: add_DrafterServicer_to_server(servicer, server), thread)
        )
        client = GrpcDrafter(f"127.0.0.1:{port}", 1, reply_timeout)
        stack.push_async_callback(client.close)
        yield client


@asynccontextmanager
async def verifier_port(
    transport: Transport, worker: Any, reply_timeout: float = 10.0
) -> AsyncIterator[VerifierPort]:
    """A VerifierPort onto ``worker``, which is a TargetWorker or behaves like one."""
    thread = WorkerThread("verifier")
    async with AsyncExitStack() as stack:
        if transport == "inproc":
            yield InprocVerifier(worker, thread, reply_timeout)
            return
        servicer = VerifierServicer(worker, thread)
        port = await stack.enter_async_context(
            serving(lambda server: add_VerifierServicer_to_server(servicer, server), thread)
        )
        client = GrpcVerifier(f"127.0.0.1:{port}", 1, reply_timeout)
        stack.push_async_callback(client.close)
        yield client


@asynccontextmanager
async def serving(register: Any, thread: WorkerThread, port: int = 0) -> AsyncIterator[int]:
    """A gRPC server on a free port (or a given one); yields the port."""
    stop = asyncio.Event()
    ready: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    address = f"127.0.0.1:{port}"
    server = asyncio.create_task(serve(address, register, thread.drain, stop, ready.set_result))
    await asyncio.wait({server, ready}, return_when=asyncio.FIRST_COMPLETED)
    try:
        yield ready.result() if ready.done() else server.result()
    finally:
        stop.set()
        await server
