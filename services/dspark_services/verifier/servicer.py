"""The verifier's RPCs, on top of its worker, which does one thing at a time."""

from collections.abc import Iterator

import grpc

from dspark.modeling.target_worker import TargetWorker
from dspark.wire import codec
from dspark.wire.dspark.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from dspark.wire.parts import without_features
from dspark.wire.server import errors_as_status
from dspark.wire.transport import PROTOCOL_VERSION, check_protocol, check_size, fits
from dspark_services.compute import ComputeThread


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    def __init__(self, worker: TargetWorker, thread: ComputeThread) -> None:
        """``thread``: where the worker was loaded and does its work."""
        self._worker = worker
        self._thread = thread

    def Handshake(
        self, request: types_pb2.HandshakeRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.VerifierHandshake:
        with errors_as_status(context):
            check_protocol(request.protocol_version, "scheduler")
        return codec.encode_target_info(self._worker.info, PROTOCOL_VERSION)

    def Verify(
        self, request_iterator: Iterator[verifier_pb2.VerifyRequest], context: grpc.ServicerContext
    ) -> Iterator[verifier_pb2.VerifyReply]:
        for request in request_iterator:
            batch = codec.decode_verify_batch(request)
            with errors_as_status(context):
                reply = self._thread.call(self._worker.verify, batch)
            message = codec.encode_verify_reply(reply)
            yield message if fits(message) else codec.encode_verify_reply(without_features(reply))

    def Features(
        self, request: verifier_pb2.FeaturesRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.FeaturesReply:
        key = codec.decode_key(request.key)
        with errors_as_status(context):
            features = self._thread.call(self._worker.features, key, request.start, request.stop)
            reply = verifier_pb2.FeaturesReply(features=features)
            check_size(reply, f"features [{request.start}, {request.stop})")
        return reply

    def Profile(
        self, request: verifier_pb2.ProfileRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.ProfileReply:
        shapes, repeats = codec.decode_profile_request(request)
        with errors_as_status(context):
            seconds = self._thread.call(self._worker.profile, shapes, repeats)
        return verifier_pb2.ProfileReply(seconds=seconds)
