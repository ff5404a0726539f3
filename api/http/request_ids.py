"""Ids of requests. A client's id may repeat; the internal one, the client's plus a random suffix, never does."""

from __future__ import annotations

import re
import secrets

from starlette.types import Scope

from api.errors import BadRequest
from api.http.headers import header

MAX_ID_LEN = 128
MAX_IDS_IN_HEADER = 16  # header lines are limited by many clients (8 KiB); a longer list is cut with "..."
REQUEST_ID_HEADER = "X-Request-Id"
ASGI_ID_HEADER = REQUEST_ID_HEADER.lower().encode()
INTERNAL_ID_HEADER = "X-Headrace-Request-Id"
_UNSAFE = re.compile(r"[^A-Za-z0-9._:\-]+")
_SAFE = re.compile(rf"[A-Za-z0-9._:\-]{{1,{MAX_ID_LEN}}}")


def header_id(scope: Scope) -> str | None:
    """The id of the X-Request-Id header. Characters that ids may not have become "-"; of several ids with commas, the first counts.

    A client's tracing must not cost it its answer, so nothing is refused. None: no header, or nothing of it is left.
    """
    given = header(scope, ASGI_ID_HEADER)
    if given is None or is_safe_id(given):
        return given
    first = next((part for part in given.split(",") if part.strip()), "")
    return _UNSAFE.sub("-", first).strip("-")[:MAX_ID_LEN] or None


def body_id(given: str | None) -> str | None:
    """The `request_id` of a body, as it is. Raises BadRequest."""
    if not given:
        return None
    if not is_safe_id(given):
        message = f"request_id must have 1 to {MAX_ID_LEN} characters, each a letter, a digit or one of . _ : -"
        raise BadRequest(message, param="request_id")
    return given


def is_safe_id(value: str) -> bool:
    return _SAFE.fullmatch(value) is not None


class RandomDigits:
    """Random hex digits of the operating system, which is asked for many at a time: a call costs as much as all of them."""

    def __init__(self) -> None:
        self._digits = ""
        self._place = 0

    def take(self, count: int) -> str:
        if self._place + count > len(self._digits):
            self._digits, self._place = secrets.token_hex(max(2048, count)), 0
        self._place += count
        return self._digits[self._place - count : self._place]


random_digits = RandomDigits().take


def internal_ids(external: str, count: int) -> list[str]:
    """One internal id a prompt: the client's, the prompt's number when there are several, 8 random hex digits."""
    suffix = random_digits(8)
    if count == 1:
        return [f"{external}-{suffix}"]
    return [f"{external}-{place}-{suffix}" for place in range(count)]


def sibling_ids(internal: str, external: str, count: int) -> list[str]:
    """The internal ids of the list that `internal` belongs to."""
    suffix = internal.rpartition("-")[2]
    return [internal] if count == 1 else [f"{external}-{place}-{suffix}" for place in range(count)]


def answer_headers(external: str, ids: list[str]) -> dict[str, str]:
    return {REQUEST_ID_HEADER: external, INTERNAL_ID_HEADER: internal_id_header(ids)}


def internal_id_header(ids: list[str]) -> str:
    shown = ids[:MAX_IDS_IN_HEADER]
    return ", ".join(shown) + (", ..." if len(ids) > len(shown) else "")
