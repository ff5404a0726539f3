"""How often watchdogs ended engines of a model, by what they saw. The counts outlive the engines."""

from __future__ import annotations

from engine.bus import keys
from engine.bus.call import Call
from engine.bus.records import parse_fields

SILENT = "silent"  # a supervisor's kind: the process lived and said nothing


def count_alarm(model: str, kind: str) -> Call[None]:
    """Sent again after a lost answer, it may count twice: an alarm is rare, and the log has it."""
    return Call(lambda answers: None, commands=(("HINCRBY", keys.alarms(model), kind, 1),))


def alarms(model: str) -> Call[dict[str, int]]:
    """Counts by kind of alarm."""
    return Call(
        lambda answers: {kind: int(count) for kind, count in parse_fields(answers[0]).items()},
        commands=(("HGETALL", keys.alarms(model)),),
    )
