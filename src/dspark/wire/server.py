"""The server end: synchronous gRPC around one synchronous worker.

A stream's requests and replies happen in one thread of gRPC's pool, which hands each step to the
worker's thread and waits. An asyncio server was measured to double the time that a call spends
outside the worker.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from dspark.core.errors import ConfigError, DSparkError
from dspark.wire.status import status_of
from dspark.wire.transport import SERVER_OPTIONS

_MAX_CALLS = 32  # streams and single calls at once; a scheduler holds one stream
_LEAVING_SECONDS = 0.5  # for the last reply to reach the wire


@contextlib.contextmanager
def errors_as_status(context: grpc.ServicerContext) -> Iterator[None]:
    """End the RPC with the status that belongs to the error raised inside."""
    try:
        yield
    except DSparkError as error:
        context.abort(status_of(error), str(error))


@contextlib.contextmanager
def serving(
    address: str, register: Callable[[grpc.Server], None], drain: Callable[[], None]
) -> Iterator[int]:
    """Serve what ``register`` adds to the server, and health, while the context lasts.

    Yields the port, which the system chooses for port 0. ``drain`` waits for the step in
    progress, which is finished on the way out.

    Raises:
        ConfigError: the address cannot be bound.
    """
    server = grpc.server(
        ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="rpc"), options=SERVER_OPTIONS
    )
    register(server)
    checks = health.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address}: is the port in use?") from error
    server.start()
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        yield port
    finally:
        checks.enter_graceful_shutdown()
        drain()
        server.stop(_LEAVING_SECONDS).wait()
