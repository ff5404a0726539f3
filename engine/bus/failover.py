"""The calls by which requests change their engine, and by which an engine and Redis agree again on what is in flight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.bus import keys
from engine.bus.call import Argument, Call, flat, milliseconds, script
from engine.fault_points import reach
from engine.protocol import FinishReason

TAKEOVER_BATCH = 128  # pending entries looked at in one script: Redis answers no other client meanwhile


class TakenOver(NamedTuple):
    orphaned: int  # requests that wait for the next engine
    ended: int  # requests that ended with an error, because engine after engine died of them


def takeover(model: str, slot: str, incarnation: int, *, sure: bool = False, blame: bool = True) -> Call[TakenOver]:
    """The requests that the slot's engines up to `incarnation` had in flight wait for the next engine of their fingerprint.

    Nothing happens while the engine's heartbeat is there, unless `sure`: its process was seen to end, or it asks itself. `blame`: a
    request counts it as a death that it may have caused. Bounded batches follow one another.
    """

    def batch(start: str, so_far: TakenOver) -> Call[TakenOver]:
        def decode(answer: list[Any]) -> TakenOver | Call[TakenOver]:
            reach("taking-over")
            done = TakenOver(so_far.orphaned + int(answer[0]), so_far.ended + int(answer[1]))
            return batch(answer[2].decode(), done) if answer[2] else done

        arguments = (
            incarnation,
            int(sure),
            int(blame),
            TAKEOVER_BATCH,
            start,
            keys.consumer(slot),
            int(FinishReason.ERROR),
            keys.client_channel(),
        )
        own_keys = (keys.owner(model, slot), keys.slot(model, slot), keys.slot_info(model, slot), keys.incarnation(model))
        return Call(decode, script("takeover", "ledger", "incarnation"), (*keys.ledger(model), *own_keys), arguments)

    return batch("-", TakenOver(0, 0))


def expire_orphans(model: str, failover_timeout: float, most: int = TAKEOVER_BATCH) -> Call[int]:
    """End requests that waited for an engine to continue them for longer than the failover time. Returns how many, `most` at
    most."""
    arguments = (milliseconds(failover_timeout), most, int(FinishReason.ERROR), keys.client_channel())
    return Call(int, script("expire_orphans", "ledger"), (*keys.ledger(model), keys.served_by(model)), arguments)


@dataclass(frozen=True)
class Difference:
    """Between what an engine holds and what Redis says it has in flight."""

    unknown: list[str]  # ids that Redis does not know
    foreign: list[str]  # ids that ended, or that another engine has
    returned: int  # requests in flight that the engine does not hold: they wait again


def reconcile(model: str, slot: str, incarnation: int, fingerprint: str, held: Sequence[str]) -> Call[Difference]:
    """Make the engine's pending list what it holds: the requests of the ids `held`. Raises Fenced, Unowned.

    No `take` of this engine may be under way.
    """
    arguments: tuple[Argument, ...] = (incarnation, slot, fingerprint, keys.consumer(slot), *held)

    def decode(answer: list[Any]) -> Difference:
        unknown, foreign, returned = answer
        return Difference([name.decode() for name in unknown], [name.decode() for name in foreign], int(returned))

    return Call(decode, script("reconcile", "ledger"), (*keys.ledger(model), keys.owner(model, slot)), arguments)


def rebuild(
    model: str,
    slot: str,
    incarnation: int,
    fingerprint: str,
    requests: Sequence[tuple[str, bytes, Mapping[str, Argument]]],
) -> Call[set[str]]:
    """Put requests that the engine holds, and that Redis has forgotten, back into Redis: (id, payload, fields of the record).

    Returns the ids of those that were aborted meanwhile. One that Redis knows after all is left as it is: a further `reconcile`
    says whose it is. Raises Fenced, Unowned.
    """
    arguments: list[Argument] = [incarnation, slot, fingerprint, keys.consumer(slot), len(requests)]
    for request_id, payload, fields in requests:
        arguments += [request_id, payload, *flat(fields)]
    return Call(
        lambda answer: {name.decode() for name in answer},
        script("rebuild", "ledger", "entries"),
        (*keys.ledger(model), keys.owner(model, slot)),
        tuple(arguments),
    )
