"""The engine's two ports over gRPC."""

from typing import Any, TypeVar

import grpc

from dspark.core.errors import MessageTooLargeError
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
from dspark.wire import codec
from dspark.wire.dspark.v1 import (
    drafter_pb2,
    drafter_pb2_grpc,
    types_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from dspark.wire.parts import join_draft, join_verify, split_draft, split_verify
from dspark.wire.status import error_of
from dspark.wire.stream import StepStream
from dspark.wire.transport import CLIENT_OPTIONS, PROTOCOL_VERSION, check_protocol

Reply = TypeVar("Reply")

_HANDSHAKE_SECONDS = 5.0
_SECONDS_PER_PROFILED_STEP = 10.0  # far above any real step: only a hung worker takes longer


class GrpcDrafter:
    """DrafterPort to a drafter process at ``endpoint`` (host:port).

    Here and in GrpcVerifier, what is too large for one message goes in several.
    """

    def __init__(self, endpoint: str, incarnation: int, reply_timeout: float) -> None:
        self._peer = f"drafter at {endpoint}"
        self._incarnation = incarnation
        self._channel = grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS)
        self._stub = drafter_pb2_grpc.DrafterStub(self._channel)
        self._stream: StepStream[drafter_pb2.DraftRequest, drafter_pb2.DraftReply] = StepStream(
            self._stub.Draft, self._peer, reply_timeout
        )

    async def handshake(self) -> DrafterInfo:
        self._stream.open()  # before: then it cannot belong to a later process than the answer
        request = _handshake_request(self._incarnation)
        reply = await _unary(self._stub.Handshake, request, _HANDSHAKE_SECONDS, self._peer)
        check_protocol(reply.protocol_version, self._peer)
        self._stream.check()
        return codec.decode_drafter_info(reply)

    async def draft(self, batch: DraftBatch) -> DraftReply:
        try:
            reply = await self._stream.exchange(codec.encode_draft_batch(batch))
        except MessageTooLargeError:
            halves = split_draft(batch)
            if halves is None:
                raise
            return join_draft(*[await self.draft(half) for half in halves])
        return codec.decode_draft_reply(reply)

    async def close(self) -> None:
        await self._stream.close()
        await self._channel.close()


class GrpcVerifier:
    """VerifierPort to a verifier process at ``endpoint`` (host:port)."""

    def __init__(self, endpoint: str, incarnation: int, reply_timeout: float) -> None:
        self._peer = f"verifier at {endpoint}"
        self._incarnation = incarnation
        self._reply_timeout = reply_timeout
        self._channel = grpc.aio.insecure_channel(endpoint, options=CLIENT_OPTIONS)
        self._stub = verifier_pb2_grpc.VerifierStub(self._channel)
        self._stream: StepStream[verifier_pb2.VerifyRequest, verifier_pb2.VerifyReply] = StepStream(
            self._stub.Verify, self._peer, reply_timeout
        )

    async def handshake(self) -> TargetInfo:
        self._stream.open()  # as the drafter's
        request = _handshake_request(self._incarnation)
        reply = await _unary(self._stub.Handshake, request, _HANDSHAKE_SECONDS, self._peer)
        check_protocol(reply.protocol_version, self._peer)
        self._stream.check()
        return codec.decode_target_info(reply)

    async def verify(self, batch: VerifyBatch) -> VerifyReply:
        try:
            reply = await self._stream.exchange(codec.encode_verify_batch(batch))
        except MessageTooLargeError as error:
            halves = split_verify(batch)
            if halves is None:
                raise MessageTooLargeError(str(error), batch.rows[0].key) from None
            return join_verify(*[await self.verify(half) for half in halves])
        return codec.decode_verify_reply(reply)

    async def features(self, key: SequenceKey, start: int, stop: int) -> bytes:
        request = codec.encode_features_request(key, start, stop)
        try:
            reply = await _unary(self._stub.Features, request, self._reply_timeout, self._peer)
        except MessageTooLargeError:
            if stop - start < 2:
                raise
            middle = (start + stop) // 2
            ranges = ((start, middle), (middle, stop))
            return b"".join([await self.features(key, *positions) for positions in ranges])
        return bytes(reply.features)

    async def profile(self, shapes: list[ProfileShape], repeats: int) -> list[float]:
        limit = _SECONDS_PER_PROFILED_STEP * len(shapes) * (repeats + 1)
        request = codec.encode_profile_request(shapes, repeats)
        reply = await _unary(self._stub.Profile, request, limit, self._peer)
        return list(reply.seconds)

    async def close(self) -> None:
        await self._stream.close()
        await self._channel.close()


def _handshake_request(incarnation: int) -> types_pb2.HandshakeRequest:
    return types_pb2.HandshakeRequest(
        protocol_version=PROTOCOL_VERSION, scheduler_incarnation=incarnation
    )


async def _unary(method: Any, request: Any, seconds: float, peer: str) -> Any:
    try:
        return await method(request, timeout=seconds)
    except grpc.aio.AioRpcError as failure:
        raise error_of(failure, peer) from failure
