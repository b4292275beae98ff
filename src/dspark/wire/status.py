"""The one table between our errors and gRPC status codes, read in both directions.

Of the codes that gRPC itself produces, only those stand here whose meaning is the same: a channel
that breaks is UNAVAILABLE, a message over the limit RESOURCE_EXHAUSTED.
"""

import grpc

from dspark.core.errors import (
    ConflictingStepError,
    DSparkError,
    HandshakeError,
    InvalidRequestError,
    MessageTooLargeError,
    OutOfBlocksError,
    StaleStepError,
    UnknownSequenceError,
    WorkerUnavailableError,
)

_STATUS_OF_ERROR: dict[type[DSparkError], grpc.StatusCode] = {
    HandshakeError: grpc.StatusCode.FAILED_PRECONDITION,
    UnknownSequenceError: grpc.StatusCode.NOT_FOUND,
    ConflictingStepError: grpc.StatusCode.ABORTED,
    StaleStepError: grpc.StatusCode.ALREADY_EXISTS,
    OutOfBlocksError: grpc.StatusCode.OUT_OF_RANGE,
    MessageTooLargeError: grpc.StatusCode.RESOURCE_EXHAUSTED,
    InvalidRequestError: grpc.StatusCode.INVALID_ARGUMENT,
    WorkerUnavailableError: grpc.StatusCode.UNAVAILABLE,
}
_ERROR_OF_STATUS = {status: error for error, status in _STATUS_OF_ERROR.items()}


def status_of(error: DSparkError) -> grpc.StatusCode:
    """The status a server answers with for ``error``; INTERNAL for what has no row."""
    return _STATUS_OF_ERROR.get(type(error), grpc.StatusCode.INTERNAL)


def error_of(failure: grpc.aio.AioRpcError, peer: str) -> DSparkError:
    """The error a client raises for a failed call.

    A status without a row is a transport or server failure: the worker counts as unavailable.
    """
    error = _ERROR_OF_STATUS.get(failure.code(), WorkerUnavailableError)
    return error(f"{peer}: {failure.details() or failure.code().name}")
