"""From the messages of a journal to the outputs of its requests, each apart: what a checkpoint stores."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from engine.bus.transitions import OutputPart
from engine.protocol import EngineCoreOutputs, decode_column, encode
from engine.runtime.owned_requests import GOES_WELL_TOKENS, OwnedRequest, OwnedRequests

CHECKPOINT_BYTES = 1 << 20  # of a journal, after which its outputs are stored apart
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
        for client in dict.fromkeys(client for client, _ in self._messages):
            self._split(client, [message for each, message in self._messages if each == client], owned, by_id)
        self._messages, self._size, self._num_flushes = [], 0, 0
        return [
            OutputPart(request_id, encode(message), request.num_tokens >= GOES_WELL_TOKENS)
            for request_id, (request, message) in by_id.items()
        ]

    @staticmethod
    def _split(
        client: str,
        messages: list[EngineCoreOutputs],
        owned: OwnedRequests,
        by_id: dict[str, tuple[OwnedRequest, EngineCoreOutputs]],
    ) -> None:
        def message_of(handle: int) -> EngineCoreOutputs | None:
            request = owned.of_handle(client, handle)
            if request is None:
                return None
            blank = EngineCoreOutputs("", 0, 0, logprobs=[], prompt_logprobs=[], finished=[])
            return by_id.setdefault(request.source.request_id, (request, blank))[1]

        handles = np.concatenate([decode_column(each.handles, np.int64) for each in messages])
        columns = [
            np.concatenate([decode_column(getattr(each, name)) for each in messages])
            for name in ("choices", "offsets", "token_ids")
        ]
        order = np.argsort(handles, kind="stable")
        found, starts = np.unique(handles[order], return_index=True)
        for handle, rows in zip(found.tolist(), np.split(order, starts[1:]), strict=False):
            part = message_of(handle)
            if part is not None:
                request = owned.of_handle(client, handle)
                assert request is not None
                request.num_tokens += len(rows)
                part.handles += handles[rows].tobytes()
                part.choices += columns[0][rows].tobytes()
                part.offsets += columns[1][rows].tobytes()
                part.token_ids += columns[2][rows].tobytes()
        for message in messages:
            for entry in message.logprobs:
                if part := message_of(entry.handle):
                    part.logprobs.append(entry)
            for prompt_entry in message.prompt_logprobs:
                if part := message_of(prompt_entry.handle):
                    part.prompt_logprobs.append(prompt_entry)
            for terminal in message.finished:
                if part := message_of(terminal.handle):
                    part.finished.append(terminal)
