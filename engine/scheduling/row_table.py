"""The numbers of running requests, a row each: columns that a pure decode step advances at once.

Rows are the workers' rows. Counts are of two moments. `num_tokens` and `num_computed` are what the workers will
have after every step planned so far. `num_known` and `num_written` are what they had when the last returned step ended.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.scheduling.request import TOKEN_BYTES, Request
from gpu.plan import Int32Array

Rows = NDArray[np.intp]

Counts = NDArray[np.int64]

_NEVER = np.iinfo(np.int64).max


def _counts(num_rows: int) -> Counts:
    return np.zeros(num_rows, dtype=np.int64)


class RowTable:
    """A request's tokens are stored in it up to `num_stored`; the newest stand in a ring of two blocks a row, and move when a
    block is full. So a step writes one column and touches a request only where it crosses a block border."""

    def __init__(self, num_rows: int, block_size: int) -> None:
        self.num_rows = num_rows
        self.block_size = block_size
        self.requests: list[Request | None] = [None] * num_rows
        self.num_tokens = _counts(num_rows)
        self.num_computed = _counts(num_rows)
        self.num_known = _counts(num_rows)
        self.num_written = _counts(num_rows)
        self.num_stored = _counts(num_rows)
        self.num_prompt = _counts(num_rows)
        self.max_tokens = _counts(num_rows)  # prompt and output, at the longest
        self.capacity = _counts(num_rows)  # tokens that the blocks held have room for
        self.next_border = _counts(num_rows)  # the num_written that completes the next block
        self.last_step = _counts(num_rows)  # newest step that computes the row
        self.last_token_time = np.zeros(num_rows, dtype=np.float64)
        self.clients = np.zeros(num_rows, dtype=np.int32)
        self.choices = np.zeros(num_rows, dtype=np.int32)
        self.handles = np.zeros(num_rows, dtype=np.int64)
        self.closed = np.zeros(num_rows, dtype=np.bool_)  # late output is dropped

        self._ring_size = 2 * block_size
        self._ring = np.zeros((num_rows, self._ring_size), dtype=np.int32)
        self._ring_flat = self._ring.reshape(-1)
        self._free = list(range(num_rows - 1, -1, -1))
        self._running = np.zeros(num_rows, dtype=np.intp)  # rows in the policy's order, and such as run no more
        self._num_listed = 0
        self._is_running = np.zeros(num_rows, dtype=np.bool_)
        self._num_running = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_without_blocks(self) -> int:
        """Tokens of running requests that are known and have no KV blocks yet. Another thread may ask."""
        # A product, not a selection by mask: numpy counts a mask before it copies, and this one may change in between.
        return int((np.maximum(self.num_tokens - self.capacity, 0) * self._is_running).sum())

    @property
    def running(self) -> Rows:
        """[num_running] rows of running requests in the policy's order; a view that the next change invalidates."""
        if self._num_listed != self._num_running:
            listed = self._running[: self._num_listed]
            kept = listed[self._is_running[listed]]
            self._running[: len(kept)] = kept
            self._num_listed = len(kept)
        return self._running[: self._num_listed]

    def request(self, row: int) -> Request:
        request = self.requests[row]
        if request is None:
            raise KeyError(f"row {row} is free")
        return request

    def unwritten_blocks(self, row: int) -> list[int]:
        """Blocks that a row holds for what the steps that returned have not written."""
        return self.request(row).block_ids[int(self.num_written[row]) // self.block_size :]

    def take(self, request: Request, num_computed: int, num_published_blocks: int, max_tokens: int) -> int:
        """A free row for a request whose first `num_computed` tokens have their KV already."""
        row = self._free.pop()
        self.requests[row] = request
        request.row = row
        num_tokens = request.num_tokens
        self.num_tokens[row] = self.num_known[row] = self.num_stored[row] = num_tokens
        self.num_computed[row] = self.num_written[row] = num_computed
        self.num_prompt[row] = request.num_prompt_tokens
        self.max_tokens[row] = max_tokens
        self.capacity[row] = len(request.block_ids) * self.block_size
        self.next_border[row] = (num_published_blocks + 1) * self.block_size
        self.last_token_time[row] = request.times.last_token
        self.clients[row] = request.client
        self.choices[row] = request.choice
        self.handles[row] = request.handle
        self.closed[row] = False
        return row

    def give_back(self, row: int) -> None:
        self.request(row).row = -1
        self.requests[row] = None
        self._free.append(row)

    def run(self, row: int, position: int) -> None:
        """Put a row into the running order."""
        end = len(self.running)
        self._running[position + 1 : end + 1] = self._running[position:end].copy()
        self._running[position] = row
        self._num_listed = end + 1
        self._is_running[row] = True
        self._num_running += 1

    def stop_running(self, row: int) -> None:
        self._is_running[row] = False
        self._num_running -= 1

    def close(self, row: int) -> None:
        """Outputs that steps that are out still bring for this row are dropped."""
        self.closed[row] = True
        self.next_border[row] = _NEVER

    def append_tokens(self, rows: Rows, token_ids: Int32Array) -> Counts:
        """One sampled token each; returns the positions they got."""
        positions = self.num_known[rows]
        self._ring_flat[rows * self._ring_size + positions % self._ring_size] = token_ids
        self.num_known[rows] = positions + 1
        return positions

    def store_tokens(self, row: int) -> None:
        """Move what the request does not have yet from the ring to it."""
        request = self.request(row)
        first, last = int(self.num_stored[row]), int(self.num_known[row])
        if first == last:
            return
        request.token_bytes += self._newest(row, first, last)
        self.num_stored[row] = last

    def store_blocks(self, rows: Rows) -> list[Request]:
        """`store_tokens` of all `rows`, whose requests come back; those that lack just a block, as decodes do, in one gather."""
        requests = [self.request(row) for row in rows.tolist()]
        first, last = self.num_stored[rows], self.num_known[rows]
        if (last - first == self.block_size).all():
            places = (first[:, None] + np.arange(self.block_size)) % self._ring_size
            newest, width = self._ring[rows[:, None], places].tobytes(), self.block_size * TOKEN_BYTES
            for index, request in enumerate(requests):
                request.token_bytes += newest[index * width : (index + 1) * width]
            self.num_stored[rows] = last
        else:
            for row in rows.tolist():
                self.store_tokens(row)
        return requests

    def token_bytes(self, row: int, first: int = 0) -> bytes:
        """The tokens of a row's request that are known, from the `first` on."""
        stored, known = int(self.num_stored[row]), int(self.num_known[row])
        newest = self._newest(row, max(first, stored), known) if first < known else b""
        return bytes(self.request(row).token_bytes[first * TOKEN_BYTES :]) + newest

    def _newest(self, row: int, first: int, last: int) -> bytes:
        assert last - first <= self._ring_size
        start, count = first % self._ring_size, last - first
        head = self._ring[row, start : start + count].tobytes()
        missing = count - len(head) // TOKEN_BYTES
        return head if missing == 0 else head + self._ring[row, :missing].tobytes()
