"""A generation as one JSON answer or as server-sent events, for as long as the client listens."""

import asyncio
import json
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from dspark.core.errors import DSparkError
from dspark.engine.events import SequenceEvent, Usage
from dspark_services.scheduler.api.errors import describe
from dspark_services.scheduler.api.generation import Generation, total_usage
from dspark_services.scheduler.api.layouts import Json, Layout
from dspark_services.scheduler.api.schema import GenerationBody

_CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; only logs can see this status
_DONE = b"data: [DONE]\n\n"


async def answer(
    request: Request, body: GenerationBody, generation: Generation, layout: Layout
) -> Response:
    """The response to a generation that was started for ``request``."""
    if body.stream:
        return EventStreamResponse(generation, layout, body)
    with generation:
        whole = await _while_connected(request.receive, _collect(generation, layout, body))
    return Response(status_code=_CLIENT_CLOSED_REQUEST) if whole is None else JSONResponse(whole)


async def _collect(generation: Generation, layout: Layout, body: GenerationBody) -> Json:
    events: list[list[SequenceEvent]] = [[] for _ in range(generation.num_choices)]
    async for index, event in generation.events():
        events[index].append(event)
    choices = []
    for index, history in enumerate(events):
        choice = layout.message(index, "".join(e.text for e in history), str(history[-1].finish))
        if body.return_token_ids:
            choice["token_ids"] = [token for event in history for token in event.tokens]
        choices.append(choice)
    usages = [_usage(history[-1]) for history in events]
    return layout.whole(choices, total_usage(usages, generation.n))


class EventStreamResponse(Response):
    """Server-sent events, ended by ``[DONE]``. Owns the generation: it is over when this is."""

    media_type = "text/event-stream"

    def __init__(self, generation: Generation, layout: Layout, body: GenerationBody) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]  # unknown
        self._generation = generation
        self._layout = layout
        self._body = body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._generation:
            await _while_connected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send(
            {
                "type": "http.response.start",
                "status": self.status_code,
                "headers": self.raw_headers,
            }
        )
        try:
            async with aclosing(self._chunks()) as chunks:
                async for chunk in chunks:
                    await send(_part(_sse(chunk)))
        except DSparkError as error:  # too late for an HTTP status
            _, description = describe(error)
            await send(_part(_sse(description)))
        await send(_part(_DONE))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _chunks(self) -> AsyncGenerator[Json]:
        layout, options = self._layout, self._body.stream_options
        says_steps, says_tokens = options.dspark_steps, self._body.return_token_ids
        usages: dict[int, Usage] = {}
        opened: set[int] = set()
        # OpenAI's rule: with include_usage, every chunk has the key.
        no_usage: Json = {"usage": None} if options.include_usage else {}
        async for index, event in self._generation.events():
            if index not in opened:
                opened.add(index)
                if opening := layout.opening(index):
                    yield layout.chunk(opening) | no_usage
            if event.text or says_steps or says_tokens:
                delta = layout.delta(index, event.text)
                if says_tokens:
                    delta["token_ids"] = event.tokens
                yield layout.chunk(delta) | no_usage | (_step(event) if says_steps else {})
            if event.finish is not None:
                usages[index] = _usage(event)
                yield layout.chunk(layout.ending(index, event.finish.value)) | no_usage
        if options.include_usage:
            in_order = [usages[index] for index in range(self._generation.num_choices)]
            yield layout.chunk() | {"usage": total_usage(in_order, self._generation.n)}


async def _while_connected(receive: Receive, work: Coroutine[Any, Any, Json | None]) -> Json | None:
    """The result of ``work``; None, and the work cancelled, if the client leaves first."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _usage(event: SequenceEvent) -> Usage:
    assert event.usage is not None, "the last event of a sequence carries its usage"
    return event.usage


def _step(event: SequenceEvent) -> Json:
    """The extension that `stream_options.dspark_steps` asks for."""
    return {
        "dspark": {
            "tokens": len(event.tokens),
            "admitted": event.admitted,
            "accepted": event.accepted,
        }
    }


def _sse(data: Json) -> bytes:
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return f"data: {text}\n\n".encode()


def _part(content: bytes) -> dict[str, Any]:
    return {"type": "http.response.body", "body": content, "more_body": True}
