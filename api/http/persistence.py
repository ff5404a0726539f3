"""How long a request is to go on without its client, and the key by which its retries are known."""

from __future__ import annotations

import hashlib

from starlette.types import Scope

from api.errors import BadRequest
from api.http.headers import header
from engine.config import ApiConfig

RESUMABLE_HEADER = "x-headrace-resumable"
IDEMPOTENCY_HEADER = "idempotency-key"
MAX_KEY_LEN = 255
PARAMETERS = {  # of generating routes, as OpenAPI describes them
    "parameters": [
        {
            "name": RESUMABLE_HEADER,
            "in": "header",
            "schema": {"type": "string"},
            "description": "true, or seconds for which the request goes on when its client has gone",
        },
        {
            "name": "Idempotency-Key",
            "in": "header",
            "schema": {"type": "string", "minLength": 1, "maxLength": MAX_KEY_LEN},
            "description": "requests with the same key and body run once and have one answer",
        },
    ]
}
MAX_STREAMED_CHOICES = 128  # of a stream that can be continued: each event's id tells how far each of them is


def grace_time(scope: Scope, body_value: bool | float | None, config: ApiConfig) -> float:
    """Seconds that a request goes on when its client has gone. `body_value`: `resumable` of the body, which counts before the
    header. Raises BadRequest."""
    value = body_value if body_value is not None else _of_header(scope)
    if value is None:
        return config.resumable_grace if header(scope, IDEMPOTENCY_HEADER.encode()) is not None else 0.0
    if isinstance(value, bool):
        return config.resumable_grace if value else 0.0
    if not 0 <= value <= config.max_resumable_grace:
        message = f"resumable must be true, false, or a number of seconds from 0 to {config.max_resumable_grace:g}."
        raise BadRequest(message, param="resumable")
    return value


def _of_header(scope: Scope) -> bool | float | None:
    given = header(scope, RESUMABLE_HEADER.encode())
    if given is None:
        return None
    text = given.strip().lower()
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        message = f"{RESUMABLE_HEADER} must be true, false, or a number of seconds."
        raise BadRequest(message, param=RESUMABLE_HEADER) from None


def idempotency_key(scope: Scope) -> str:
    """ "": the request has none. Raises BadRequest."""
    key = header(scope, IDEMPOTENCY_HEADER.encode())
    if key is None:
        return ""
    if not 1 <= len(key) <= MAX_KEY_LEN or not key.isprintable():
        message = f"Idempotency-Key must have 1 to {MAX_KEY_LEN} printable characters."
        raise BadRequest(message, param="Idempotency-Key")
    return key


def body_hash(scope: Scope, raw: bytes) -> str:
    """Two requests with the same hash ask for the same."""
    path: str = scope["path"]
    return hashlib.sha256(path.encode() + b"\0" + raw).hexdigest()[:32]
