"""Requests that are past their deadline, by Redis' clock: those that wait end here, the engines end the others."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.bus import keys, transitions
from engine.bus.call import Call, script
from engine.protocol import LATE, LATE_IN_QUEUE, Abort, FinishReason

MOST = 256  # requests looked at in one script
PAUSE = 5.0  # seconds until an engine is told again to end a request that is late


class Expired(NamedTuple):
    in_queue: int
    running: int


def expire_late(model: str) -> Call[Expired]:
    """End the requests that are late, some hundreds at most."""

    def decode(answer: list[Any]) -> Call[Expired]:
        return _end_running(model, [name.decode() for name in answer[1]], Expired(int(answer[0]), len(answer[1])))

    arguments = (MOST, int(FinishReason.ERROR), keys.client_channel(), LATE_IN_QUEUE, PAUSE)
    return Call(decode, script("expire_late", "ledger"), keys.ledger(model), arguments)


def _end_running(model: str, ids: list[str], done: Expired) -> Call[Expired]:
    if not ids:
        return Call(lambda answers: done)
    first, *others = ids
    command = Abort(first, reason=FinishReason.ERROR, error=LATE)
    return transitions.finish(model, first, command, LATE).then(lambda _: _end_running(model, others, done))
