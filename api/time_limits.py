"""How long a request may take: by its headers, else by its body, else by the server's settings."""

from __future__ import annotations

import math
from typing import NamedTuple

from starlette.types import Scope

from api.errors import BadRequest
from api.http.headers import header
from api.request.schemas import RequestFields
from engine.config import ApiConfig

TIMEOUT_HEADER = "X-Headrace-Timeout"
QUEUE_TIMEOUT_HEADER = "X-Headrace-Queue-Timeout"
LONGEST = 30 * 86_400.0  # seconds


class TimeLimits(NamedTuple):
    """Seconds; 0.0: none."""

    total: float = 0.0  # from its enqueue to its end
    waiting: float = 0.0  # from its enqueue until an engine takes it


def time_limits(scope: Scope, body: RequestFields, config: ApiConfig) -> TimeLimits:
    """Raises BadRequest."""
    return TimeLimits(
        _seconds(scope, TIMEOUT_HEADER, "timeout", body.timeout, config.default_timeout),
        _seconds(scope, QUEUE_TIMEOUT_HEADER, "queue_timeout", body.queue_timeout, config.default_queue_timeout),
    )


def _seconds(scope: Scope, name: str, field: str, own: float | None, default: float) -> float:
    given = header(scope, name.lower().encode())
    if given is None and own is None:
        return default
    try:
        seconds = own if given is None else float(given)
    except ValueError:
        seconds = None
    if seconds is None or not 0 < seconds <= LONGEST or math.isnan(seconds):
        param = field if given is None else name
        raise BadRequest(f"{param} must be a number of seconds, more than 0 and at most {LONGEST:.0f}.", param=param)
    return seconds
