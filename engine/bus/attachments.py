"""Which stream of which API server listens to a request: attachments come and go while the request goes on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from engine.bus import keys
from engine.bus.call import Argument, Call, milliseconds, script
from engine.bus.control import COMMANDS_KEPT, CONTROL_TTL
from engine.protocol import Attach, encode


class Attachment(NamedTuple):
    client: str  # incarnation of the API server
    handle: int  # its own number for the request


def attach(model: str, client: str, requests: Sequence[tuple[str, int]]) -> Call[list[str]]:
    """Send the output of requests, (id, handle) each, to an API server from now on; all at once, so that no stream of an answer in
    several parts is left behind. Returns their states: "queued", "running", "ended" or "unknown".

    Output of before is asked for, or read from the records of ended requests. The streams that listened are told.
    """
    arguments: list[Argument] = [
        client,
        COMMANDS_KEPT,
        milliseconds(CONTROL_TTL),
        keys.client_channel(),
        keys.control_channel(model),
        len(requests),
    ]
    for request_id, handle in requests:
        arguments += [request_id, handle, encode(Attach(request_id, client, handle))]

    def decode(answer: list[Any]) -> list[str]:
        return [state.decode() for state in answer]

    return Call(decode, script("attach", "ledger", "commands"), (*keys.ledger(model), keys.control(model)), tuple(arguments))


def detach(model: str, request_id: str, client: str, handle: int | None = None) -> Call[float | None]:
    """An attachment is lost: its client or its API server has gone. Returns the seconds after which the request is to be ended, if
    no stream has attached by then; 0.0: at once. None: this attachment is not the present one, or the request has ended.

    `handle`: None stands for all of that API server's.
    """

    def decode(answer: int) -> float | None:
        return None if answer < 0 else answer / 1000

    arguments = (request_id, client, "" if handle is None else handle)
    return Call(decode, script("detach", "ledger"), keys.ledger(model), arguments)
