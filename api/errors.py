"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}`, with the status of the cause.

Statuses and types are vLLM's (docs/http-api.md says where headrace does better).
"""

from __future__ import annotations

import http
import logging
import re
import reprlib
from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from engine.bus.call import BusUnavailable, Trouble

logger = logging.getLogger("headrace.api")

MAX_REPORTED_ERRORS = 10  # entries of a validation error that are told
MAX_REPORTED_INPUT = 200  # characters of an offending value that are repeated
MAX_MESSAGE = 4000  # characters: a message may repeat what a client sent
RETRY_AFTER = {"Retry-After": "1"}  # seconds; a restarted engine takes longer, but asking again costs little

_REPR = reprlib.Repr()  # looks at the beginning of a value alone, however large it is
_REPR.maxstring = _REPR.maxother = 2 * MAX_REPORTED_INPUT
_REPR.maxlist = _REPR.maxdict = 16
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+(?=>)")
_FRAME = re.compile(r'File "[^"]*", line \d+(, in [\w.<>]+)?')
_PATH = re.compile(r"(?<![\w:/.])/(?:[\w.+-]+/)+[\w.+-]+")


class ConfigurationError(ValueError):
    """Settings that must not be started with."""


class ApiError(Exception):
    """An answer with an error status. `param` names the offending field, `headers` go into the response."""

    status = 500
    type = "InternalServerError"

    def __init__(self, message: str, param: str | None = None, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.headers = headers or {}

    def __reduce__(self) -> tuple[Any, ...]:
        return _revive, (type(self), self.message, self.param, self.headers)


def _revive(kind: type[ApiError], message: str, param: str | None, headers: dict[str, str]) -> ApiError:
    """An error that came out of another process."""
    error = kind.__new__(kind)
    ApiError.__init__(error, message, param, headers)
    return error


class InvalidRequest(ApiError):
    """The body, the query or a header has the wrong shape.

    `faults`: pydantic's entries, each with `loc`, `msg`, `type` and, where there is one, the offending `input`.
    """

    status = 400
    type = "Bad Request"

    def __init__(self, faults: Sequence[Any]) -> None:
        lines = [f"{len(faults)} validation error{'s' if len(faults) != 1 else ''}:"]
        lines += [f"  {_where(each)}: {each['msg']} (type={each['type']}{_shown(each)})" for each in faults[:MAX_REPORTED_ERRORS]]
        if len(faults) > MAX_REPORTED_ERRORS:
            lines.append(f"  ... and {len(faults) - MAX_REPORTED_ERRORS} more")
        super().__init__("\n".join(lines), _where(faults[0]) if faults else None)

    @classmethod
    def of_body(cls, error: ValidationError) -> InvalidRequest:
        return cls([{**fault, "loc": ("body", *fault["loc"])} for fault in error.errors(include_url=False, include_context=False)])


class BadRequest(ApiError):
    """The request is well-formed JSON but asks for something that cannot be."""

    status = 400
    type = "BadRequestError"


class Unauthorized(ApiError):
    """No key, or one that is not known."""

    status = 401
    type = "AuthenticationError"


class Forbidden(ApiError):
    """The key is known, and does not allow this."""

    status = 403
    type = "PermissionDeniedError"


class NotFound(ApiError):
    """No such model or request."""

    status = 404
    type = "NotFoundError"


class Conflict(ApiError):
    """Another request has taken this one's place."""

    status = 409
    type = "ConflictError"


class IdempotencyKeyReused(ApiError):
    """An Idempotency-Key stands for another body."""

    status = 422
    type = "IdempotencyKeyReused"


class PayloadTooLarge(ApiError):
    """The body exceeds --max-request-bytes."""

    status = 413
    type = http.HTTPStatus(413).phrase


class TooManyRequests(ApiError):
    """The tenant has more in the queue than its share, while others wait too."""

    status = 429
    type = "RateLimitError"


class ServiceUnavailable(ApiError):
    """Nothing wrong with the request: no engine, a full queue, Redis away, or a server that is stopping."""

    status = 503
    type = "ServiceUnavailableError"


class RedisTrouble(ServiceUnavailable):
    """Redis does not serve now."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(f"Redis {trouble}. Try again later.", headers=RETRY_AFTER)


class UnusableModel(ApiError):
    """The model's own files are broken."""


class GenerationError(ApiError):
    """The engine gave the request up; the message is its reason."""

    status = 500
    type = "InternalServerError"


class DeadlineExceeded(ApiError):
    """The request took longer than it was allowed to."""

    status = 504
    type = "DeadlineExceededError"


def sanitize_message(message: str) -> str:
    """`message`, which is not of our own wording, without memory addresses, stack frames and absolute paths."""
    message = message[:MAX_MESSAGE]
    return _PATH.sub("<path>", _FRAME.sub("<frame>", _ADDRESS.sub("", message)))


def error_body(message: str, type: str, code: int, param: str | None = None) -> bytes:
    return msgspec.json.encode({"error": {"message": message[:MAX_MESSAGE], "type": type, "param": param, "code": code}})


def error_response(error: ApiError) -> Response:
    """`error` as a whole HTTP response."""
    return Response(body_of(error), error.status, headers=error.headers, media_type="application/json")


def json_response(value: Any) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")


def body_of(error: ApiError) -> bytes:
    """`error` as the JSON of a response body or of a stream's error event."""
    return error_body(error.message, error.type, error.status, error.param)


def as_api_error(error: BaseException) -> ApiError:
    """The answer to a client for `error`: itself if it is an answer, a 503 when Redis is away, else a bare 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BusUnavailable):
        return RedisTrouble(error.trouble)
    return ApiError("Internal server error.")


def phrase_error(status: int, detail: str | None = None) -> bytes:
    phrase = http.HTTPStatus(status).phrase
    return error_body(detail or phrase, phrase, status)


def _where(fault: dict[str, Any]) -> str:
    return ".".join(str(part) for part in fault["loc"])


def _shown(fault: dict[str, Any]) -> str:
    """The offending value, cut if it is large. Empty for broken JSON, where it would be the whole body."""
    if "input" not in fault or fault["type"] == "json_invalid":
        return ""
    return f", input={_shortened(_REPR.repr(fault['input']))}"


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_REPORTED_INPUT else text[:MAX_REPORTED_INPUT] + "..."


async def on_api_error(request: Request, error: Exception) -> Response:
    """Of any error: one that is no answer becomes a bare 500."""
    return error_response(as_api_error(error))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    return error_response(InvalidRequest(error.errors()))


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    headers = dict(error.headers) if error.headers else None
    detail = error.detail
    if error.status_code == 404 and detail == http.HTTPStatus(404).phrase:
        detail = f"There is no {request.method} {_shortened(request.scope['path'])} on this server."
    return Response(phrase_error(error.status_code, detail), error.status_code, headers=headers, media_type="application/json")


def install_error_handlers(app: FastAPI) -> None:
    """For all errors but those that nobody expects."""
    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(BusUnavailable, on_api_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
