"""The place of a request in the queue: asked for, and changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.bus import keys
from engine.bus.call import Call, script


def prioritize(model: str, request_id: str, priority: int) -> Call[str]:
    """Give a request that waits another priority. Returns its state: only a "queued" one has changed; or "unknown"."""
    return Call(lambda answer: str(answer.decode()), script("prioritize", "ledger"), keys.ledger(model), (request_id, priority))


def num_before(model: str, entries: Sequence[str]) -> Call[list[int | None]]:
    """How many requests wait before each of these entries. None: it does not wait, or its engine died and it comes first."""

    def decode(answers: list[Any]) -> list[int | None]:
        return list(answers)

    return Call(decode, commands=tuple(("ZRANK", keys.order(model), _member(entry)) for entry in entries))


def _member(entry: str) -> str:
    """As lua/ledger.lua makes it: equal scores are in order of arrival."""
    milliseconds, _, sequence = entry.partition("-")
    return f"{milliseconds}-{int(sequence):06}"
