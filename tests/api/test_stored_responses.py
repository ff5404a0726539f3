"""What a new response reads of stored ones."""

from __future__ import annotations

from typing import Any

import pytest

from api import stored_responses
from api.request.schemas import ItemReferences


async def test_a_response_is_read_once_however_many_of_its_items_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    async def find(request: Any, response_id: str) -> None:
        asked.append(response_id)

    monkeypatch.setattr(stored_responses, "find_response", find)
    references = ItemReferences(ids=["msg_a-1_0", "msg_a-1_1", "rs_a-1_2", "msg_b-2_0", "none"])
    past = await stored_responses.past_of(None, None, references)  # type: ignore[arg-type]
    assert asked == ["a-1", "b-2"]
    assert past.items == {}
