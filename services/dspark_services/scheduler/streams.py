"""What a request's consumer sees of the engine's events."""

import asyncio
from collections.abc import Iterable
from typing import Self

from dspark.core.errors import DSparkError
from dspark.core.types import SequenceKey
from dspark.engine.events import SequenceEvent


class EventStream:
    """Async iterator over one sequence's events; ends after the one that finishes it.

    Raises the error that ended the sequence instead, if one did.
    """

    def __init__(self, key: SequenceKey) -> None:
        self.key = key
        self._events: asyncio.Queue[SequenceEvent | DSparkError] = asyncio.Queue()
        self._ended = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceEvent:
        if self._ended:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, DSparkError):
            self._ended = True
            raise event
        self._ended = event.finish is not None
        return event

    def push(self, event: SequenceEvent | DSparkError) -> None:
        self._events.put_nowait(event)


class StreamTable:
    """The open streams by sequence."""

    def __init__(self) -> None:
        self._streams: dict[SequenceKey, EventStream] = {}

    def open(self, key: SequenceKey) -> EventStream:
        stream = self._streams[key] = EventStream(key)
        return stream

    def close(self, key: SequenceKey) -> None:
        self._streams.pop(key, None)

    def deliver(self, events: Iterable[SequenceEvent]) -> None:
        for event in events:
            self._streams[event.key].push(event)
            if event.finish is not None:
                self.close(event.key)

    def fail(self, key: SequenceKey, error: DSparkError) -> None:
        """End the sequence's stream, if it is open, with ``error``."""
        stream = self._streams.pop(key, None)
        if stream is not None:
            stream.push(error)

    def fail_all(self, error: DSparkError) -> list[SequenceKey]:
        """End every stream with ``error``; returns the sequences they belonged to."""
        failed = list(self._streams)
        for stream in self._streams.values():
            stream.push(error)
        self._streams.clear()
        return failed
