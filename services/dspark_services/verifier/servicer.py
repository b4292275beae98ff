"""The verifier's RPCs, on top of its worker, which does one thing at a time."""

import threading
from collections.abc import Iterator

import grpc

from dspark.modeling.target_worker import TargetWorker
from dspark.wire import codec
from dspark.wire.dspark.v1 import types_pb2, verifier_pb2, verifier_pb2_grpc
from dspark.wire.server import errors_as_status
from dspark.wire.transport import PROTOCOL_VERSION, check_protocol


class VerifierServicer(verifier_pb2_grpc.VerifierServicer):
    def __init__(self, worker: TargetWorker) -> None:
        self._worker = worker
        self.turn = threading.Lock()

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
            with errors_as_status(context), self.turn:
                reply = self._worker.verify(batch)
            yield codec.encode_verify_reply(reply)

    def Features(
        self, request: verifier_pb2.FeaturesRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.FeaturesReply:
        key = codec.decode_key(request.key)
        with errors_as_status(context), self.turn:
            features = self._worker.features(key, request.start, request.stop)
        return verifier_pb2.FeaturesReply(features=features)

    def Profile(
        self, request: verifier_pb2.ProfileRequest, context: grpc.ServicerContext
    ) -> verifier_pb2.ProfileReply:
        shapes, repeats = codec.decode_profile_request(request)
        with errors_as_status(context), self.turn:
            seconds = self._worker.profile(shapes, repeats)
        return verifier_pb2.ProfileReply(seconds=seconds)
