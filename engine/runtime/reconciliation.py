"""Redis and the engine agree again on what is in flight, after Redis was restarted, rolled back, wiped or out of reach."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.bus import failover
from engine.bus.enqueue import first_fields
from engine.protocol import encode
from engine.runtime.owned_requests import OwnedRequest, OwnedRequests
from engine.runtime.slot_owner import SlotOwner

logger = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds between two comparisons, where nothing happened


@dataclass(frozen=True)
class Forget:
    """To the loop: these requests are not this engine's any more. They end without a word."""

    ids: frozenset[str]


@dataclass(frozen=True)
class StoreOutputs:
    """To the loop: Redis may have lost output of what runs. All of it is to be stored again."""


class Reconciler:
    def __init__(self, owner: SlotOwner, owned: OwnedRequests, inbox: queue.SimpleQueue[Any]) -> None:
        self._owner = owner
        self._owned = owned
        self._inbox = inbox

    def run(self, ended: Sequence[OwnedRequest] = ()) -> None:
        """Compare, and mend both sides. `ended`: requests whose end Redis may have lost; they come to run in Redis again, so that
        their end can be sent again. Safe on any thread. Raises BusUnavailable, Fenced."""
        owner = self._owner
        with self._owned.taking:
            everything = {each.source.request_id: each for each in (*ended, *self._owned.all())}
            held = [(request_id, each.entry) for request_id, each in everything.items()]
            found = owner.run(failover.reconcile(owner.model, owner.slot, owner.incarnation, owner.fingerprint, held))
            if found.unknown:
                self._rebuild([everything[request_id] for request_id in found.unknown])
            self._drop(frozenset(found.foreign) - {each.source.request_id for each in ended})
            if found.returned:
                logger.warning("%d requests in flight were not held here: they wait again", found.returned)

    def _rebuild(self, lost: list[OwnedRequest]) -> None:
        owner = self._owner
        logger.warning("Redis has forgotten %d requests of this engine: they are put back", len(lost))
        requests = [(each.source.request_id, encode(each.source), first_fields(each.source, owner.model)) for each in lost]
        entries = owner.run(failover.rebuild(owner.model, owner.slot, owner.incarnation, owner.fingerprint, requests))
        for each, entry in zip(lost, entries, strict=True):
            each.entry = entry
        self._drop(frozenset(each.source.request_id for each in lost if not each.entry))
        self.store_outputs()

    def _drop(self, ids: frozenset[str]) -> None:
        if ids:
            logger.warning("%d requests are another engine's by now, or ended: they are dropped here", len(ids))
            self._owned.remove(ids)
            self._inbox.put(Forget(ids))

    def store_outputs(self) -> None:
        """Let the loop have all output of what runs stored again."""
        self._inbox.put(StoreOutputs())
