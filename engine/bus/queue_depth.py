"""The numbers of requests that wait or run for a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.bus import keys
from engine.bus.call import Call
from engine.bus.records import parse_fields


@dataclass(frozen=True)
class TenantLoad:
    """What one tenant has in the queue. The names are those of the sums in Redis."""

    requests: int = 0  # choices that wait or run
    waiting: int = 0  # choices not taken by any engine
    tokens: int = 0  # of prompts that wait


@dataclass(frozen=True)
class QueueDepth:
    """`waiting`: not taken by any engine."""

    waiting: int  # requests
    waiting_choices: int
    waiting_tokens: int  # of prompts
    live: int  # requests that wait or run
    live_choices: int
    tenants: Mapping[str, TenantLoad] = field(default_factory=dict, compare=False)  # those that have requests

    @property
    def everybody(self) -> TenantLoad:
        return TenantLoad(self.live_choices, self.waiting_choices, self.waiting_tokens)


def queue_depth(model: str) -> Call[QueueDepth]:
    def decode(answers: list[Any]) -> QueueDepth:
        waiting, live, flat = answers
        sums = {name: int(value) for name, value in parse_fields(flat).items()}
        names = [name.removeprefix("requests:") for name in sums if name.startswith("requests:")]
        tenants = {
            name: TenantLoad(*(sums.get(f"{what}:{name}", 0) for what in ("requests", "waiting", "tokens"))) for name in names
        }
        return QueueDepth(int(waiting), sums.get("waiting", 0), sums.get("tokens", 0), int(live), sums.get("requests", 0), tenants)

    commands = (("ZCARD", keys.order(model)), ("ZCARD", keys.live(model)), ("HGETALL", keys.load(model)))
    return Call(decode, commands=commands)
