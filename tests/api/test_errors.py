"""Messages that leave the server."""

from __future__ import annotations

import msgspec

from api.errors import MAX_MESSAGE, GenerationError, ServiceUnavailable, as_api_error, body_of, sanitize_message
from engine.bus import BusUnavailable


def test_nothing_of_the_inside_is_told() -> None:
    said = sanitize_message('<X object at 0x7f00aa> File "/srv/app/x.py", line 3, in f: cannot open /etc/secret/key.pem')
    assert said == "<X object> <frame>: cannot open <path>"


def test_messages_have_an_end() -> None:
    body = msgspec.json.decode(body_of(GenerationError("x" * 10_000)))
    assert len(body["error"]["message"]) == MAX_MESSAGE


def test_what_is_told_of_an_exception() -> None:
    assert as_api_error(RuntimeError("secret")).message == "Internal server error."
    away = as_api_error(BusUnavailable("10.0.0.1 refused"))
    assert isinstance(away, ServiceUnavailable)
    assert away.headers["Retry-After"]
    assert "10.0.0.1" not in away.message
