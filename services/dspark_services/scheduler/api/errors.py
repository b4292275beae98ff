"""Every failure as OpenAI's error object."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from dspark.core.errors import (
    DSparkError,
    InvalidRequestError,
    MessageTooLargeError,
    ModelNotFoundError,
    OverloadedError,
    WorkerUnavailableError,
)

RETRY_AFTER_SECONDS = 2
_MAX_MESSAGE = 400

# From the most specific class to the least: (status, OpenAI's type, OpenAI's code).
_KINDS: tuple[tuple[type[DSparkError], int, str, str | None], ...] = (
    (ModelNotFoundError, HTTPStatus.NOT_FOUND, "invalid_request_error", "model_not_found"),
    (MessageTooLargeError, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, "invalid_request_error", None),
    (InvalidRequestError, HTTPStatus.BAD_REQUEST, "invalid_request_error", None),
    (OverloadedError, HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "overloaded"),
    (WorkerUnavailableError, HTTPStatus.SERVICE_UNAVAILABLE, "server_error", "unavailable"),
    (DSparkError, HTTPStatus.INTERNAL_SERVER_ERROR, "server_error", None),
)


def error_body(
    message: str, kind: str, *, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: DSparkError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body of an error of ours."""
    _, status, kind, code = next(row for row in _KINDS if isinstance(error, row[0]))
    param = getattr(error, "param", None)
    return status, error_body(str(error), kind, param=param, code=code)


def respond(status: int, body: dict[str, Any]) -> JSONResponse:
    retry = {"Retry-After": str(RETRY_AFTER_SECONDS)}
    headers = retry if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return JSONResponse(body, status, headers)


def refusal(status: int, message: str) -> JSONResponse:
    """A request that is refused for what it is, not for a field in it."""
    return respond(status, error_body(message, "invalid_request_error"))


def install(app: FastAPI) -> None:
    """Make the app answer every failure, its framework's own included, in one shape."""
    app.add_exception_handler(DSparkError, _ours)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _framework)
    app.add_exception_handler(Exception, _defect)


async def _ours(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, DSparkError)
    return respond(*describe(error))


async def _invalid_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return refusal(HTTPStatus.BAD_REQUEST, f"the body is not JSON: {first['ctx']['error']}")
    # A location names the branch of a union too ("str", "list[...]"); clients know only fields.
    path = [part for part in first["loc"][1:] if isinstance(part, int) or part.isidentifier()]
    param = ".".join(map(str, path)) or None
    problem = first["msg"].removeprefix("Value error, ")
    message = f"{param or 'body'}: {problem}"[:_MAX_MESSAGE]
    return respond(
        HTTPStatus.BAD_REQUEST, error_body(message, "invalid_request_error", param=param)
    )


async def _framework(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        message = f"{request.method} {request.url.path[:100]}: {error.detail}"
    response = refusal(error.status_code, message)
    response.headers.update(error.headers or {})
    return response


async def _defect(request: Request, error: Exception) -> JSONResponse:
    # The server logs the traceback; a client gets none of it.
    return respond(
        HTTPStatus.INTERNAL_SERVER_ERROR, error_body("internal server error", "server_error")
    )
