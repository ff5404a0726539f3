"""The output that dead engines made of the requests that this engine continues, read from checkpoints and journals."""

from __future__ import annotations

import logging
from typing import Protocol, TypeVar

import msgspec

from engine.bus import journals
from engine.bus.call import Call
from engine.bus.journals import OutputPart, StoredPart
from engine.bus.transitions import Orphan
from engine.protocol import EngineCoreOutputs, EngineCoreRequest, decode_client_message, encode
from engine.runtime.folding import FoldedOutput, by_attachment, fold
from engine.runtime.slot_owner import SlotOwner

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Insist(Protocol):
    """Runs a call again and again while Redis is away. Raises BusUnavailable when the engine stops, and Fenced."""

    def __call__(self, call: Call[T]) -> T: ...


class OrphanOutputs:
    def __init__(self, owner: SlotOwner, insist: Insist) -> None:
        self._owner = owner
        self._insist = insist
        self._journals: dict[str, dict[tuple[str, int], EngineCoreOutputs]] = {}  # of dead engines, by name: rows by attachment

    def fold(self, source: EngineCoreRequest, orphan: Orphan) -> FoldedOutput:
        """All output of the request, which this engine stores as its first part."""
        owner = self._owner
        (parts,) = self._insist(journals.read_checkpoints(owner.model, [source.request_id]))
        messages = _readable(parts)
        for name in orphan.journals:
            journal = self._journal(name)
            messages += [(each[0], journal[each]) for each in orphan.attachments if each in journal]
        folded = fold(source, messages, orphan.attachments, orphan.cached_tokens, orphan.times)
        part = OutputPart(source.request_id, encode(folded.as_message(source.handle)), "adopt")
        self._insist(journals.checkpoint(owner.model, owner.slot, owner.incarnation, [part]))
        return folded

    def _journal(self, name: str) -> dict[tuple[str, int], EngineCoreOutputs]:
        """A dead engine's journal, read once for all of its requests that come with one take."""
        if name not in self._journals:
            parts = _readable(self._insist(journals.read_journal(self._owner.model, name)))
            self._journals[name] = by_attachment((client, message) for client, message in parts if client is not None)
        return self._journals[name]

    def forget_journals(self) -> None:
        """All requests of a take were folded."""
        self._journals.clear()


def _readable(parts: list[StoredPart]) -> list[tuple[str | None, EngineCoreOutputs]]:
    """(API server, message). What cannot be read counts as lost: it is computed again."""
    messages: list[tuple[str | None, EngineCoreOutputs]] = []
    for part in parts:
        try:
            message = decode_client_message(part.payload)
        except msgspec.DecodeError as error:
            logger.error("a stored output cannot be read: %s", error)
        else:
            if isinstance(message, EngineCoreOutputs):
                messages.append((part.client, message))
    return messages
