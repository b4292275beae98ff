"""The choices of one API call, from submission to the last event, however it ends."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from time import perf_counter
from typing import Self

from dspark.core.errors import DSparkError
from dspark.engine.events import SequenceEvent, Usage
from dspark.engine.request import Request
from dspark.ops.metrics import Metrics
from dspark_services.scheduler.driver import Driver
from dspark_services.scheduler.streams import EventStream

_ABORT = "abort"  # the client has left
_ERROR = "error"


class Generation:
    """Submits all requests or none; choice i of prompt p has the index i + p * n.

    A context manager: what has not ended when it is left is cancelled, on both workers, in the
    step that follows. Raises what `Driver.submit` raises.
    """

    def __init__(
        self, driver: Driver, metrics: Metrics, requests: Sequence[Request], *, n: int
    ) -> None:
        self.n = n
        self.num_choices = len(requests)
        self._driver = driver
        self._metrics = metrics
        self._submitted = perf_counter()
        self._last_delivery: list[float | None] = [None] * len(requests)
        self._open: dict[int, EventStream] = {}  # by choice
        try:
            for index, request in enumerate(requests):
                self._open[index] = driver.submit(request)
        except DSparkError:
            self._cancel()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for _ in self._open:
            self._metrics.finished.labels(_ABORT).inc()
        self._cancel()

    async def events(self) -> AsyncIterator[tuple[int, SequenceEvent]]:
        """(choice index, event) as they come.

        Raises:
            WorkerUnavailableError: the verifier was gone for too long.
        """
        try:
            async for index, event in _merge(dict(self._open)):
                self._count(index, event)
                yield index, event
        except DSparkError:
            for _ in self._open:
                self._metrics.finished.labels(_ERROR).inc()
            self._cancel()
            raise

    def _count(self, index: int, event: SequenceEvent) -> None:
        metrics, now, last = self._metrics, perf_counter(), self._last_delivery[index]
        if last is None:
            metrics.time_to_first_token.observe(now - self._submitted)
        else:
            metrics.inter_token_latency.observe((now - last) / len(event.tokens))
        self._last_delivery[index] = now
        metrics.generated_tokens.inc(len(event.tokens))
        if event.finish is not None:
            assert event.usage is not None, "the last event carries the usage"
            del self._open[index]
            metrics.finished.labels(event.finish.value).inc()
            metrics.request_seconds.observe(now - self._submitted)
            metrics.prompt_tokens.inc(event.usage.prompt_tokens)
            metrics.cached_tokens.inc(event.usage.cached_tokens)

    def _cancel(self) -> None:
        for stream in self._open.values():
            self._driver.cancel(stream.key)
        self._open.clear()


async def _merge(streams: dict[int, EventStream]) -> AsyncIterator[tuple[int, SequenceEvent]]:
    """The events of several streams in order of arrival."""
    if len(streams) == 1:  # the common case costs no task per event
        ((index, stream),) = streams.items()
        async for event in stream:
            yield index, event
        return
    arrivals = {asyncio.ensure_future(stream.__anext__()): i for i, stream in streams.items()}
    try:
        while arrivals:
            done, _ = await asyncio.wait(arrivals, return_when=asyncio.FIRST_COMPLETED)
            for arrival in sorted(done, key=lambda task: arrivals[task]):
                event = arrival.result()
                index = arrivals.pop(arrival)
                if event.finish is None:
                    arrivals[asyncio.ensure_future(streams[index].__anext__())] = index
                yield index, event
    finally:
        for arrival in arrivals:
            arrival.cancel()
        await asyncio.gather(*arrivals, return_exceptions=True)  # all are gone, none complains


def total_usage(usages: Sequence[Usage], n: int) -> dict[str, object]:
    """OpenAI's usage object for a call with these choices; every prompt is counted once.

    Beside OpenAI's fields, `dspark` sums the speculation over all choices.
    """
    prompt_tokens = sum(usage.prompt_tokens for usage in usages[::n])
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in usages[::n])},
        "dspark": {
            name: sum(getattr(usage, name) for usage in usages)
            for name in ("steps", "proposed", "admitted", "accepted")
        },
    }
