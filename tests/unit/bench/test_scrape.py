import pytest

from dspark.bench.scrape import scrape
from dspark.core.errors import WorkerUnavailableError
from dspark.ops.ports import free_ports


def test_a_server_that_is_gone_is_an_error_of_ours() -> None:
    (port,) = free_ports("127.0.0.1", 1)
    with pytest.raises(WorkerUnavailableError, match=f"127.0.0.1:{port} stopped answering"):
        scrape(f"http://127.0.0.1:{port}")
