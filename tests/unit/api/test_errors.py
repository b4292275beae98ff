"""Which HTTP answer an error becomes."""

import pytest
from dspark_services.scheduler.api.errors import describe

from dspark.core.errors import (
    DSparkError,
    InvalidRequestError,
    MessageTooLargeError,
    OutOfBlocksError,
    OverloadedError,
)
from dspark.core.types import SequenceKey


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequestError("no", "n"), 400, "invalid_request_error"),
        (MessageTooLargeError("no", SequenceKey(1, 2)), 413, "invalid_request_error"),
        (OverloadedError("no"), 503, "server_error"),
        (OutOfBlocksError("no"), 500, "server_error"),
    ],
)
def test_status_and_type_say_whose_fault_it_is(error: DSparkError, status: int, kind: str) -> None:
    code, body = describe(error)
    assert (code, body["error"]["type"], body["error"]["message"]) == (status, kind, "no")
