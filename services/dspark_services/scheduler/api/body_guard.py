"""Bodies that no handler should ever see: too large, or not JSON."""

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from dspark_services.scheduler.api.errors import refusal


class BodyGuard:
    """ASGI middleware: reads a POST's body up to ``max_bytes`` before it lets the request in."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        kind = headers.get("content-type", "none").split(";")[0].strip().lower()
        if kind != "application/json":
            refused = refusal(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"content type {kind[:100]} is not supported: send application/json",
            )
            await refused(scope, receive, send)
            return
        body = await self._read(headers, receive)
        if body is None:
            refused = refusal(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is larger than {self._max_bytes} bytes",
            )
            await refused(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes | None:
        """The body; None if it is too large, whatever length was declared."""
        declared = headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > self._max_bytes:
            return None
        body = bytearray()
        while True:
            message = await receive()
            body += message.get("body", b"")
            if len(body) > self._max_bytes:
                return None
            if not message.get("more_body", False):  # the end, or the client has left
                return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever really follows."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
