"""The numbers of requests that wait or run for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.bus import keys
from engine.bus.call import Call


@dataclass(frozen=True)
class QueueDepth:
    """`waiting`: not taken by any engine."""

    waiting: int  # requests
    waiting_choices: int
    waiting_tokens: int  # of prompts
    live: int  # requests that wait or run
    live_choices: int


def queue_depth(model: str) -> Call[QueueDepth]:
    def decode(answers: list[Any]) -> QueueDepth:
        waiting_choices, waiting_tokens, live_choices = (int(value or 0) for value in answers[2])
        return QueueDepth(int(answers[0]), waiting_choices, waiting_tokens, int(answers[1]), live_choices)

    commands = (
        ("ZCARD", keys.order(model)),
        ("ZCARD", keys.live(model)),
        ("HMGET", keys.load(model), "waiting", "tokens", "requests"),
    )
    return Call(
        decode, commands=commands
    )  # no transaction: Redis refuses those when it is out of memory, and reads alone it answers
