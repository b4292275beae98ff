"""`dspark-verifier`: load the model, then serve it over gRPC until told to stop."""

import logging
from collections.abc import Sequence

from dspark.wire.dspark.v1.verifier_pb2_grpc import add_VerifierServicer_to_server
from dspark.wire.server import serving
from dspark_services.compute import ComputeThread
from dspark_services.models import load_target_worker
from dspark_services.process import one_line_failures, start, wait_for_signal
from dspark_services.verifier.servicer import VerifierServicer

log = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> None:
    with one_line_failures("verifier"):
        settings = start("verifier", argv)
        thread = ComputeThread("model")
        servicer = VerifierServicer(thread.call(load_target_worker, settings), thread)
        with serving(
            f"{settings.host}:{settings.verifier_port}",
            lambda server: add_VerifierServicer_to_server(servicer, server),
            thread.drain,
        ) as port:
            log.info("serving", extra={"port": port})
            wait_for_signal()
        log.info("stopped")


if __name__ == "__main__":
    main()
