"""The numbers of requests that wait or run for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.bus import keys
from engine.bus.call import Call


@dataclass(frozen=True)
class QueueDepth:
    queued: int  # requests that wait
    queued_tokens: int  # their prompt tokens
    live: int  # requests that wait or run
    choices: int  # their choices


def queue_depth(model: str) -> Call[QueueDepth]:
    def decode(answers: list[Any]) -> QueueDepth:
        choices, tokens = answers[2]
        return QueueDepth(int(answers[0]), int(tokens or 0), int(answers[1]), int(choices or 0))

    commands = (
        ("ZCARD", keys.order(model)),
        ("ZCARD", keys.live(model)),
        ("HMGET", keys.load(model), "requests", "tokens"),
    )
    return Call(decode, commands=commands, transaction=True)
