"""Live requests and their rows and blocks: every change of state (wait, run, preempted, ended) and every give-back."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from engine.protocol import FinishReason
from engine.scheduling.kv_cache_manager import KVCacheManager, PrefixHit
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.row_table import RowTable
from engine.scheduling.stop_check import StopTokens
from engine.scheduling.waiting_queue import ORDER_KEYS, WaitingQueue
from gpu.plan import Int32Array


class LiveRequests:
    """The one place where requests change their state; rows, queue and KV cache are the scheduler's, and change with it.

    A step that is out may write rows and blocks of a request that ends or is preempted meanwhile. Its blocks are deferred: it keeps
    them, and its row, until that step has returned. An end counts as come only then.
    """

    def __init__(self, policy: str, max_model_len: int, rows: RowTable, waiting: WaitingQueue, kv: KVCacheManager) -> None:
        self._rows = rows
        self._waiting = waiting
        self._kv = kv
        self._requests: dict[tuple[str, int], Request] = {}
        self._choices: dict[str, list[int]] = {}  # live choices by request id
        self._stop_tokens = StopTokens()
        self._deferred: list[Request] = []
        self._ended: list[Request] = []  # nothing is held any more; not yet told
        self._freed_rows: list[int] = []  # not yet told to the workers
        self._returned_step = 0  # newest step whose output was taken in
        self._max_model_len = max_model_len
        self._order_key = ORDER_KEYS[policy]
        self._sequence = 0

    # ------------------------------------------------------------------ who lives

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def by_key(self) -> Mapping[tuple[str, int], Request]:
        """By (id, choice)."""
        return self._requests

    def find(self, request_id: str, choice: int) -> list[Request]:
        """The live choice, or all of a request's (-1)."""
        choices = [choice] if choice >= 0 else sorted(self._choices.get(request_id, ()))
        return [self._requests[request_id, one] for one in choices if (request_id, one) in self._requests]

    def most_tokens(self, request: Request) -> int:
        """How many tokens, prompt and output, end a request."""
        most = max(request.sampling.max_tokens, 1)  # where none is wanted, the first one ends the request and is not kept
        if request.ordered_stop is not None:
            most = min(most, request.ordered_stop[0])
        return min(request.num_prompt_tokens + most, self._max_model_len)

    def may_end(self, token_ids: Int32Array) -> NDArray[np.bool_]:
        """[num_tokens] whether some live request ends at this token."""
        return self._stop_tokens.candidates(token_ids)

    # ------------------------------------------------------------------ changes of state

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError for a (id, choice) that is live."""
        if request.key in self._requests:
            raise ValueError(f"request {request.request_id} choice {request.choice} is live already")
        self._sequence += 1
        request.sequence = self._sequence
        self._requests[request.key] = request
        self._choices.setdefault(request.request_id, []).append(request.choice)
        self._stop_tokens.add(request)
        self._waiting.push(request)

    def add_ended(self, request: Request) -> None:
        """One that ended before it came: only its end is to be told."""
        self._ended.append(request)

    def start(self, request: Request, hit: PrefixHit, num_blocks: int) -> None:
        """A waiting request runs, with its prefix hit and `num_blocks` more."""
        self._waiting.remove(request)
        self._kv.admit(request, hit, num_blocks)
        request.status = RequestStatus.RUNNING
        rows = self._rows
        row = rows.take(request, len(hit.block_ids) * self._kv.block_size, hit.num_published, self.most_tokens(request))
        position, key = rows.num_running, self._order_key(request)
        while position and self._order_key(rows.request(int(rows.running[position - 1]))) > key:
            position -= 1
        rows.run(row, position)

    def preempt(self, request: Request) -> None:
        """Recompute later: blocks go back, tokens stay, and the request waits before all that came after it."""
        request.status = RequestStatus.PREEMPTED
        request.times.num_preemptions += 1
        self._rows.stop_running(request.row)
        self._waiting.push(request)
        self._release_or_defer(request)

    def drop_output(self, request: Request) -> None:
        """For a request with a row: drop the outputs of steps that are out, and let no request share the blocks that they write.
        The KV that they read is not to be trusted."""
        self._rows.close(request.row)
        self._kv.revoke(request)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        keep: int = -1,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a live request in any state. `keep` >= 0 cuts its output to that many tokens."""
        row, was_running = request.row, request.status is RequestStatus.RUNNING
        if row >= 0:
            self._take_tokens(request)
            self._rows.close(row)
        request.end(reason, keep, stop_reason, error, now)
        self._forget(request)
        if was_running:
            self._rows.stop_running(row)
            self._release_or_defer(request)
        else:
            self._waiting.remove_ended(request)
            if row < 0:  # else it was preempted, and its blocks are deferred already
                self._ended.append(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.key]
        choices = self._choices[request.request_id]
        choices.remove(request.choice)
        if not choices:
            del self._choices[request.request_id]
        self._stop_tokens.remove(request)

    # ------------------------------------------------------------------ give-backs

    def step_returned(self, step: int) -> None:
        """A step's output was taken in: what only it could still write is free."""
        self._returned_step = step
        deferred, self._deferred = self._deferred, []
        for request in deferred:
            self._release_or_defer(request)

    def take_ended(self) -> list[Request]:
        """Requests that ended and hold nothing any more, each once."""
        ended, self._ended = self._ended, []
        return ended

    def take_freed_rows(self) -> list[int]:
        """Rows that fell free since the last call."""
        freed, self._freed_rows = self._freed_rows, []
        return freed

    @property
    def any_ended(self) -> bool:
        """`take_ended` has something to tell."""
        return bool(self._ended)

    @property
    def any_deferred(self) -> bool:
        return bool(self._deferred)

    def num_deferred_blocks(self) -> int:
        """Blocks that the return of the steps that are out will free."""
        return sum(self._kv.pool.ref_count(block) == 1 for request in self._deferred for block in request.block_ids)

    def is_out(self, row: int) -> bool:
        """A step that has not returned computes this row."""
        return bool(self._rows.last_step[row] > self._returned_step)

    def _release_or_defer(self, request: Request) -> None:
        row = request.row
        if self.is_out(row):
            self._deferred.append(request)
            return
        if request.status.finished:
            self._ended.append(request)
        else:
            self._take_tokens(request)
        self._kv.free(request)
        self._rows.give_back(row)
        self._freed_rows.append(row)

    def _take_tokens(self, request: Request) -> None:
        self._rows.store_tokens(request.row)
        request.times.last_token = float(self._rows.last_token_time[request.row])

    def check_integrity(self) -> None:
        """Raises AssertionError when requests, rows and blocks do not add up."""
        rows = self._rows
        holders = [request for request in rows.requests if request is not None]
        self._kv.pool.check_integrity(request.block_ids for request in holders)
        assert rows.num_free + len(holders) == rows.num_rows, "a row is lost"
        running = [rows.request(int(row)) for row in rows.running]
        assert all(request.status is RequestStatus.RUNNING for request in running), "what runs is not running"
        assert len(running) + len(self._deferred) == len(holders), "a row has no request"
        assert all(request.row < 0 and not request.block_ids for request in self._ended), "an end before its blocks are free"
        assert len(self._waiting) == sum(1 for _ in self._waiting), "the waiting queue is miscounted"
        assert len(running) + len(self._waiting) == len(self._requests), "a request is lost"
        assert sum(map(len, self._choices.values())) == len(self._requests), "a choice is lost"
