"""Redis and the engine agree again on what is in flight, after Redis was restarted, rolled back, wiped or out of reach."""

from __future__ import annotations

import logging
import queue
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.bus import failover
from engine.bus.enqueue import first_fields
from engine.bus.failover import Difference
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
        with self._owned.taking:
            held = {each.source.request_id: each for each in (*ended, *self._owned.all())}
            while (found := self._compare(list(held))).unknown:
                aborted = self._rebuild([held[request_id] for request_id in found.unknown])
                self._drop(aborted)
                for request_id in aborted:
                    del held[request_id]
            self._drop(set(found.foreign) - {each.source.request_id for each in ended})

    def _compare(self, ids: list[str]) -> Difference:
        owner = self._owner
        found = owner.run(failover.reconcile(owner.model, owner.slot, owner.incarnation, owner.fingerprint, ids))
        if found.returned:
            logger.warning("%d requests in flight were not held here: they wait again", found.returned)
        return found

    def _rebuild(self, lost: list[OwnedRequest]) -> set[str]:
        """Put requests back that Redis has forgotten. Returns the ids of those that were aborted meanwhile."""
        owner = self._owner
        logger.warning("Redis has forgotten %d requests of this engine: they are put back", len(lost))
        requests = [(each.source.request_id, encode(each.source), first_fields(each.source, owner.model)) for each in lost]
        aborted = owner.run(failover.rebuild(owner.model, owner.slot, owner.incarnation, owner.fingerprint, requests))
        self.store_outputs()
        return aborted

    def _drop(self, ids: set[str]) -> None:
        if ids:
            logger.warning("%d requests are another engine's by now, or ended: they are dropped here", len(ids))
            self._owned.remove(ids)
            self._inbox.put(Forget(frozenset(ids)))

    def store_outputs(self) -> None:
        """Let the loop have all output of what runs stored again."""
        self._inbox.put(StoreOutputs())
