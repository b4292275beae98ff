"""Real workers behind real ports, in the test's own process."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Literal

from dspark_services.compute import ComputeThread
from dspark_services.drafter.servicer import DrafterServicer
from dspark_services.scheduler.clients import GrpcDrafter, GrpcVerifier
from dspark_services.scheduler.inproc import InprocDrafter, InprocVerifier
from dspark_services.verifier.servicer import VerifierServicer

from dspark.engine.ports import DrafterPort, VerifierPort
from dspark.wire.dspark.v1.drafter_pb2_grpc import add_DrafterServicer_to_server
from dspark.wire.dspark.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from dspark.wire.server import serving

Transport = Literal["grpc", "inproc"]


@asynccontextmanager
async def drafter_port(
    transport: Transport, worker: Any, reply_timeout: float = 10.0
) -> AsyncIterator[DrafterPort]:
    """A DrafterPort onto ``worker``, which is a DraftWorker or behaves like one."""
    if transport == "inproc":
        yield InprocDrafter(worker, ComputeThread("drafter"), reply_timeout)
        return
    with drafter_server(worker) as endpoint:
        client = GrpcDrafter(endpoint, 1, reply_timeout)
        yield client
        await client.close()


@asynccontextmanager
async def verifier_port(
    transport: Transport, worker: Any, reply_timeout: float = 10.0
) -> AsyncIterator[VerifierPort]:
    """A VerifierPort onto ``worker``, which is a TargetWorker or behaves like one."""
    if transport == "inproc":
        yield InprocVerifier(worker, ComputeThread("verifier"), reply_timeout)
        return
    with verifier_server(worker) as endpoint:
        client = GrpcVerifier(endpoint, 1, reply_timeout)
        yield client
        await client.close()


@contextmanager
def drafter_server(worker: Any, endpoint: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve a drafter's worker; yields the endpoint."""
    thread = ComputeThread("drafter")
    servicer = DrafterServicer(worker, thread)
    with serving(
        endpoint,
        lambda server: add_DrafterServicer_to_server(servicer, server),
        thread.drain,
    ) as port:
        yield f"127.0.0.1:{port}"


@contextmanager
def verifier_server(worker: Any, endpoint: str = "127.0.0.1:0") -> Iterator[str]:
    """Serve a verifier's worker; yields the endpoint."""
    thread = ComputeThread("verifier")
    servicer = VerifierServicer(worker, thread)
    with serving(
        endpoint,
        lambda server: add_VerifierServicer_to_server(servicer, server),
        thread.drain,
    ) as port:
        yield f"127.0.0.1:{port}"
