"""The errors of all routes but the probes', as OpenAPI describes them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from api.request.messages_schemas import MessagesErrorAnswer
from api.request.schemas import ErrorAnswer


def _errors(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    return {
        "4XX": {"model": model, "description": "Nothing was done, for a reason of the request's"},
        "5XX": {"model": model, "description": "Nothing is wrong with the request; 503 says when to ask again"},
    }


ERRORS = _errors(ErrorAnswer)
MESSAGES_ERRORS = _errors(MessagesErrorAnswer)
