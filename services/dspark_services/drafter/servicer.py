"""The drafter's RPCs, on top of its worker, which does one thing at a time."""

from collections.abc import Iterator

import grpc

from dspark.modeling.draft_worker import DraftWorker
from dspark.wire import codec
from dspark.wire.dspark.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2
from dspark.wire.server import errors_as_status
from dspark.wire.transport import PROTOCOL_VERSION, check_protocol
from dspark_services.compute import ComputeThread


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    def __init__(self, worker: DraftWorker, thread: ComputeThread) -> None:
        """``thread``: where the worker was loaded and does its work."""
        self._worker = worker
        self._thread = thread

    def Handshake(
        self, request: types_pb2.HandshakeRequest, context: grpc.ServicerContext
    ) -> drafter_pb2.DrafterHandshake:
        with errors_as_status(context):
            check_protocol(request.protocol_version, "scheduler")
        return codec.encode_drafter_info(self._worker.info, PROTOCOL_VERSION)

    def Draft(
        self, request_iterator: Iterator[drafter_pb2.DraftRequest], context: grpc.ServicerContext
    ) -> Iterator[drafter_pb2.DraftReply]:
        for request in request_iterator:
            batch = codec.decode_draft_batch(request)
            with errors_as_status(context):
                reply = self._thread.call(self._worker.draft, batch)
            yield codec.encode_draft_reply(reply)
