"""An engine's ownership of its slot: the calls that only the owner may make, and the way back after Redis was wiped."""

from __future__ import annotations

import logging
import threading
from typing import TypeVar

from engine.bus import leases
from engine.bus.call import Call, Unowned
from engine.bus.connection import Bus
from engine.bus.tokenizers import put_tokenizer
from engine.protocol import EngineInfo, TokenizerBundle

T = TypeVar("T")

logger = logging.getLogger(__name__)


class SlotOwner:
    """Runs calls for a slot on any thread. `info` names slot and incarnation; `bundle` goes into Redis again after a wipe."""

    def __init__(self, bus: Bus, info: EngineInfo, bundle: TokenizerBundle | None = None) -> None:
        self.bus = bus
        self.info = info
        self.model, self.slot, self.incarnation = info.model, info.slot, info.incarnation
        self.fingerprint = info.fingerprint
        self._bundle = bundle
        self._claiming = threading.Lock()
        self.must_reconcile = threading.Event()  # Redis was wiped, or out of reach: what it knows of this engine may be old

    def run(self, call: Call[T]) -> T:
        """As `Bus.run`. Where Redis was wiped, the slot is claimed again first. Raises BusUnavailable, Fenced."""
        while True:
            try:
                return self.bus.run(call)
            except Unowned:
                self._claim_again()

    def _claim_again(self) -> None:
        with self._claiming:
            logger.warning("Redis has forgotten the owner of slot %s of %s: the engine claims it again", self.slot, self.model)
            if self._bundle is not None:
                self.bus.run(put_tokenizer(self.model, self.info.tokenizer, self._bundle))
            self.bus.run(leases.reclaim_slot(self.model, self.slot, self.incarnation))
            self.must_reconcile.set()
