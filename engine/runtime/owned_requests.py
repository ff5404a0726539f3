"""The requests that are this engine's by Redis' ledger: from the `take` that gave them to the flush that ended them.

The loop's `HeldRequests` is narrower: a request that was taken is on its way to the loop, and one that ended waits for its flush.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from engine.bus.transitions import SUSPECT_DEATHS
from engine.protocol import EngineCoreOutputs, EngineCoreRequest, decode_column

GOES_WELL_TOKENS = 64  # output tokens after which a request is no reason of the deaths before


@dataclass
class OwnedRequest:
    source: EngineCoreRequest  # with the API server and handle that it is attached to now
    attempts: int = 0  # engines that died with it, one after the other
    num_tokens: int = 0  # of output since it was taken; counted only while `attempts` count
    attachments: list[tuple[str, int]] = field(default_factory=list)  # (API server, handle) that outputs of this engine bear

    @property
    def is_suspect(self) -> bool:
        return self.attempts >= SUSPECT_DEATHS

    @property
    def goes_well(self) -> bool:
        """It has made so much output that the deaths before are to count no more."""
        return self.attempts > 0 and self.num_tokens >= GOES_WELL_TOKENS

    def clears_itself(self) -> bool:
        """The deaths before do not count any more; True once."""
        cleared = self.goes_well
        if cleared:
            self.attempts = 0
        return cleared


class OwnedRequests:
    """Safe on any thread. The thread that takes requests holds `taking` until they are here: a thread without it may miss some that
    Redis has given already."""

    def __init__(self) -> None:
        self.taking = threading.RLock()
        self._by_id: dict[str, OwnedRequest] = {}
        self._ids: dict[tuple[str, int], str] = {}  # by API server and handle
        self._blamed: set[str] = set()  # those that engines died with, and that have not cleared themselves

    def add(self, owned: OwnedRequest) -> None:
        self._by_id[owned.source.request_id] = owned
        if owned.attempts:
            self._blamed.add(owned.source.request_id)
        self._note_attachment(owned)

    def note_output(self, messages: Iterable[tuple[str, EngineCoreOutputs]]) -> bool:
        """Output was flushed: (API server, message). True: some request goes well, and Redis does not know yet."""
        if not self._blamed:
            return False
        for client, message in messages:
            handles, counts = np.unique(decode_column(message.handles, np.int64), return_counts=True)
            for handle, count in zip(handles.tolist(), counts.tolist(), strict=True):
                if (owned := self.of_handle(client, handle)) is not None:
                    owned.num_tokens += count
        for request_id in list(self._blamed):
            if (blamed := self._by_id.get(request_id)) is None or not blamed.attempts:
                self._blamed.discard(request_id)
        return any(owned.goes_well for request_id in self._blamed if (owned := self._by_id.get(request_id)) is not None)

    def attach(self, request_id: str, source: EngineCoreRequest) -> None:
        """The request is attached elsewhere now. Outputs under the earlier handle remain its own."""
        if owned := self._by_id.get(request_id):
            owned.source = source
            self._note_attachment(owned)

    def _note_attachment(self, owned: OwnedRequest) -> None:
        attachment = owned.source.client, owned.source.handle
        owned.attachments.append(attachment)
        self._ids[attachment] = owned.source.request_id

    def remove(self, ids: Iterable[str]) -> list[OwnedRequest]:
        removed = [owned for request_id in ids if (owned := self._by_id.pop(request_id, None)) is not None]
        for owned in removed:
            for attachment in owned.attachments:
                self._ids.pop(attachment, None)
        return removed

    def get(self, request_id: str) -> OwnedRequest | None:
        return self._by_id.get(request_id)

    def of_handle(self, client: str, handle: int) -> OwnedRequest | None:
        return self._by_id.get(self._ids.get((client, handle), ""))

    def all(self) -> list[OwnedRequest]:
        return list(self._by_id.values())

    @property
    def any_suspect(self) -> bool:
        return any(owned.is_suspect for owned in self.all())
