"""The errors of all routes but the probes', as OpenAPI describes them."""

from __future__ import annotations

from typing import Any

from api.request.schemas import ErrorAnswer

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorAnswer, "description": "Nothing was done, for a reason of the request's"},
    "5XX": {"model": ErrorAnswer, "description": "Nothing is wrong with the request; 503 says when to ask again"},
}
