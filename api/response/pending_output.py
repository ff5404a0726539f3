"""Output that slow clients have not taken yet: merged by choice, and bounded over all clients of the process."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable

from api.response.output_processor import ChoiceOutput, CollectedOutput

PART_BYTES = 1 << 18  # in memory: pieces are merged up to this size, so that what is written at once is bounded too


class OutputBudget:
    """The bytes that all clients together may leave waiting. Beyond them the client with most is dropped."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._total = 0
        self._waiting: dict[PendingOutput, int] = {}  # bytes of each client that has some waiting

    def change(self, pending: PendingOutput, num_bytes: int) -> None:
        """So many more bytes wait for a client, or fewer."""
        self._total += num_bytes
        if left := self._waiting.pop(pending, 0) + num_bytes:
            self._waiting[pending] = left
        if self._total > self._max_bytes:
            most = max(self._waiting, key=self._waiting.__getitem__)
            most.drop(self._waiting[most])


class PendingOutput:
    """What waits for one client. `drop` is called with the number of bytes when it is too much; it clears this."""

    def __init__(self, budget: OutputBudget, drop: Callable[[int], None], keeps_pieces: bool = False) -> None:
        self.drop = drop
        self._keeps_pieces = keeps_pieces
        self._budget = budget
        self.parts: dict[int, deque[_Part]] = {}  # by choice; none: nothing waits

    def add(self, output: ChoiceOutput) -> None:
        parts = self.parts.setdefault(output.index, deque())
        if not parts or parts[-1].num_bytes >= PART_BYTES:
            parts.append(_Part(output.index, self._keeps_pieces))
        num_bytes = _size(output)
        parts[-1].add(output)
        parts[-1].num_bytes += num_bytes
        self._budget.change(self, num_bytes)

    def pop(self) -> ChoiceOutput:
        """The oldest part of the choice that has waited longest. The other parts of that choice come behind those of the others."""
        index = next(iter(self.parts))
        parts = self.parts.pop(index)
        part = parts.popleft()
        if parts:
            self.parts[index] = parts
        self._budget.change(self, -part.num_bytes)
        return part.output()

    def close(self) -> None:
        """Nothing waits, and nothing is dropped, any more."""
        self.clear()
        self.drop = _nothing

    def clear(self) -> None:
        for parts in self.parts.values():
            self._budget.change(self, -sum(part.num_bytes for part in parts))
        self.parts.clear()


def _nothing(num_bytes: int) -> None:
    pass


class _Part(CollectedOutput):
    num_bytes = 0


def _size(output: ChoiceOutput) -> int:
    """Bytes of memory, about."""
    num_logprobs = len(output.logprobs) * len(output.logprobs[0].token_ids) if output.logprobs else 0
    return 100 + sys.getsizeof(output.text) + 40 * len(output.token_ids) + 250 * len(output.logprobs) + 75 * num_logprobs
