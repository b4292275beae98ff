"""`dspark-drafter`: load the model, then serve it over gRPC until told to stop."""

import logging
from collections.abc import Sequence

from dspark.wire.dspark.v1.drafter_pb2_grpc import add_DrafterServicer_to_server
from dspark.wire.server import serving
from dspark_services.compute import ComputeThread
from dspark_services.drafter.servicer import DrafterServicer
from dspark_services.models import load_draft_worker
from dspark_services.process import one_line_failures, start, wait_for_signal

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_failures("drafter"):
        settings = start("drafter", argv)
        thread = ComputeThread("model")
        servicer = DrafterServicer(thread.call(load_draft_worker, settings), thread)
        with serving(
            f"{settings.host}:{settings.drafter_port}",
            lambda server: add_DrafterServicer_to_server(servicer, server),
            thread.drain,
        ) as port:
            log.info("serving", extra={"port": port})
            wait_for_signal()
        log.info("stopped")


if __name__ == "__main__":
    main()
