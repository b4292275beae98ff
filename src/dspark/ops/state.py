"""Small shared state that outlives a process: text by key, in files or in Redis.

It holds what is dear to measure and harmless to lose (cost profiles). It is never on the path of a
token: a store that does not answer costs a log line and a new measurement.
"""

import logging
import os
from pathlib import Path
from typing import Protocol

from dspark.core.errors import ConfigError

log = logging.getLogger(__name__)

_KEY_PREFIX = "dspark:"
_TIMEOUT_SECONDS = 2.0


class StateStore(Protocol):
    async def get(self, key: str) -> str | None:
        """The text stored under `key`; None if there is none, or the store does not answer."""
        ...

    async def put(self, key: str, text: str) -> None:
        """Store `text`; a store that does not answer is logged and left alone."""
        ...

    async def close(self) -> None: ...


class FileStore:
    """A file for each key. Writers replace it in one move, so readers never see half of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def get(self, key: str) -> str | None:
        path = self._path(key)
        return path.read_text() if path.is_file() else None

    async def put(self, key: str, text: str) -> None:
        path = self._path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            scratch = path.with_suffix(f".{os.getpid()}")
            scratch.write_text(text)
            scratch.replace(path)
        except OSError as error:
            log.warning("%s cannot be kept: %s", path, error)

    async def close(self) -> None:
        """Nothing is held open."""

    def _path(self, key: str) -> Path:
        return self._folder / f"{key.replace(':', '-')}.json"


class RedisStore:
    """Keys of a Redis or Valkey database, under one prefix."""

    def __init__(self, url: str) -> None:
        """Raises ConfigError if `url` is malformed or the redis package is missing."""
        try:
            from redis import asyncio as redis
            from redis.exceptions import RedisError
        except ImportError as error:
            raise ConfigError(f"state {url} needs the redis extra: pip install redis") from error
        try:
            self._client = redis.from_url(
                url,
                decode_responses=True,
                socket_timeout=_TIMEOUT_SECONDS,
                socket_connect_timeout=_TIMEOUT_SECONDS,
            )
        except ValueError as error:
            raise ConfigError(f"state {url} is not a Redis URL: {error}") from error
        self._errors = (RedisError, OSError)

    async def get(self, key: str) -> str | None:
        try:
            text = await self._client.get(_KEY_PREFIX + key)
        except self._errors as error:
            log.warning("Redis does not answer, %s is taken as absent: %s", key, error)
            return None
        return None if text is None else str(text)

    async def put(self, key: str, text: str) -> None:
        try:
            await self._client.set(_KEY_PREFIX + key, text)
        except self._errors as error:
            log.warning("Redis does not answer, %s is not kept: %s", key, error)

    async def close(self) -> None:
        await self._client.aclose()


def open_store(url: str, folder: Path) -> StateStore:
    """The store of a setting: `file` (in `folder`) or `redis://HOST:PORT/DB`.

    Raises:
        ConfigError: it is neither.
    """
    if url == "file":
        return FileStore(folder)
    if url.startswith(("redis://", "rediss://", "unix://")):
        return RedisStore(url)
    raise ConfigError(f"state {url!r} is neither file nor redis://HOST:PORT/DB")
