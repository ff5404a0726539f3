"""From the messages of a journal to the outputs of its requests, each apart: what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence

from engine.bus.journals import OutputPart
from engine.protocol import EngineCoreOutputs, encode
from engine.runtime.folding import by_attachment
from engine.runtime.owned_requests import OwnedRequest, OwnedRequests

CHECKPOINT_BYTES = 4 << 20  # of a journal, after which its outputs are stored apart
CHECKPOINT_FLUSHES = 2048


class OpenJournal:
    """The messages that were flushed since the last checkpoint."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, EngineCoreOutputs]] = []  # (API server, message)
        self._size = 0  # bytes
        self._num_flushes = 0

    def add(self, messages: Sequence[tuple[str, EngineCoreOutputs]], size: int) -> None:
        self._messages += messages
        self._size += size
        self._num_flushes += 1

    @property
    def is_full(self) -> bool:
        return self._size >= CHECKPOINT_BYTES or self._num_flushes >= CHECKPOINT_FLUSHES

    def take_parts(self, owned: OwnedRequests) -> list[OutputPart]:
        """The outputs of the requests that have not ended, one part each; the journal is empty then."""
        by_id: dict[str, tuple[OwnedRequest, EngineCoreOutputs]] = {}
        for (client, handle), rows in by_attachment(self._messages).items():
            if (request := owned.of_handle(client, handle)) is not None:
                blank = EngineCoreOutputs("", 0, 0, logprobs=[], prompt_logprobs=[], finished=[])
                _append(by_id.setdefault(request.source.request_id, (request, blank))[1], rows)
        self._messages, self._size, self._num_flushes = [], 0, 0
        return [
            OutputPart(request_id, encode(message), "well" if request.clears_itself() else "")
            for request_id, (request, message) in by_id.items()
        ]


def _append(message: EngineCoreOutputs, rows: EngineCoreOutputs) -> None:
    """A request that was attached elsewhere meanwhile has rows under several handles."""
    for column in ("handles", "choices", "offsets", "token_ids", "logprobs", "prompt_logprobs", "finished"):
        setattr(message, column, getattr(message, column) + getattr(rows, column))
