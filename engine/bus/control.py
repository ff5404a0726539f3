"""Commands to a running engine, through the control stream of its slot."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.bus import keys
from engine.bus.call import Call, milliseconds, script
from engine.bus.records import parse_fields
from engine.protocol import ControlCommand, decode_control, encode

logger = logging.getLogger(__name__)

COMMANDS_KEPT = 65536  # of a control stream, about
CONTROL_TTL = 600.0  # seconds that a control stream outlives its last command


def control(model: str, slot: str, incarnation: int, command: ControlCommand) -> Call[None]:
    """Put a command before one engine incarnation. A later holder of the slot leaves it aside."""
    arguments = (
        incarnation,
        encode(command),
        COMMANDS_KEPT,
        milliseconds(CONTROL_TTL),
        keys.control_channel(model, slot),
    )
    return Call(lambda answer: None, script("control", "commands"), (keys.control(model, slot),), arguments)


@dataclass(frozen=True)
class ControlBatch:
    last_id: str  # where to read on
    commands: list[ControlCommand]


def read_control(
    model: str, slot: str, incarnation: int, last_id: str = "0", block: float = 0.0, count: int = 1024
) -> Call[ControlBatch]:
    """Commands for this incarnation behind `last_id`; waits at most `block` seconds for one. Commands that this version cannot
    read are left aside."""
    options = ("BLOCK", milliseconds(block)) if block > 0 else ()
    mine = b"%d" % incarnation

    def decode(answers: list[Any]) -> ControlBatch:
        entries = answers[0][0][1] if answers[0] else []
        commands: list[ControlCommand] = []
        for _, flat in entries:
            fields = parse_fields(flat)
            if fields.get("incarnation") != mine:
                continue
            try:
                commands.append(decode_control(fields.get("command", b"")))
            except msgspec.DecodeError as error:
                logger.error("a command to slot %s of %s cannot be read: %s", slot, model, error)
        return ControlBatch(entries[-1][0].decode() if entries else last_id, commands)

    command = ("XREAD", "COUNT", count, *options, "STREAMS", keys.control(model, slot), last_id)
    return Call(decode, commands=(command,), block=block)


def publish(channel: str, payload: bytes) -> Call[int]:
    """A hint or a reply to the present listeners of a channel. Returns how many there are."""
    return Call(lambda answers: int(answers[0]), commands=(("PUBLISH", channel, payload),))
