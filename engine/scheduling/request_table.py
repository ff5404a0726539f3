"""Live requests and what they hold: every change of state (wait, run, preempted, ended) and every give-back of rows and blocks."""

from __future__ import annotations

from engine.protocol import FinishReason
from engine.scheduling.kv_cache_manager import KVCacheManager, PrefixHit
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.request_columns import RowTable
from engine.scheduling.request_queue import ORDER_KEYS, WaitingQueue
from engine.scheduling.stats import SchedulerStatistics
from engine.scheduling.stop_check import StopTokens


class LiveRequests:
    """Owner of rows, KV and the waiting queue.

    A step that is out may write rows and blocks of a request that ends or is preempted meanwhile. Such a request is deferred: it
    keeps both until that step has returned.
    """

    def __init__(self, policy: str, max_num_seqs: int, max_model_len: int, kv: KVCacheManager) -> None:
        self.kv = kv
        self.rows = RowTable(max_num_seqs, kv.block_size)
        self.waiting = WaitingQueue(policy)
        self.requests: dict[tuple[str, int], Request] = {}
        self.stop_tokens = StopTokens()
        self.statistics = SchedulerStatistics()
        self.deferred: list[Request] = []
        self.freed_rows: list[int] = []  # not yet told to the workers
        self.ended_unasked: list[Request] = []  # ended by the scheduler itself, not yet told
        self._max_model_len = max_model_len
        self._order_key = ORDER_KEYS[policy]
        self._choices: dict[str, list[int]] = {}  # live choices by request id
        self._sequence = 0
        self.returned_step = 0  # newest step whose output was taken in

    def add(self, request: Request) -> None:
        """Let a request wait. Raises ValueError for a (id, choice) that is live."""
        if request.key in self.requests:
            raise ValueError(f"request {request.request_id} choice {request.choice} is live already")
        self._sequence += 1
        request.sequence = self._sequence
        self.requests[request.key] = request
        self._choices.setdefault(request.request_id, []).append(request.choice)
        self.stop_tokens.add(request)
        self.waiting.push(request)

    def find(self, request_id: str, choice: int) -> list[Request]:
        """The live choice, or all of a request's (-1)."""
        choices = [choice] if choice >= 0 else sorted(self._choices.get(request_id, ()))
        return [self.requests[request_id, one] for one in choices if (request_id, one) in self.requests]

    def start(self, hit: PrefixHit, num_blocks: int, now: float) -> Request:
        """The head of the queue runs, with its prefix hit and `num_blocks` more. What the prefix cache gave counts at the first
        admission only, so that a preempted request does not look like cached traffic."""
        request = self.waiting.pop()
        self.kv.admit(request, hit, num_blocks)
        num_computed = len(hit.block_ids) * self.kv.block_size
        if request.status is RequestStatus.WAITING:
            request.times.scheduled = now
            request.num_cached_tokens = num_computed
            if self.kv.reads_cache(request):
                self.statistics.counters.prefix_cache_queries += request.num_tokens
                self.statistics.counters.prefix_cache_hits += num_computed
        request.status = RequestStatus.RUNNING
        most = max(request.sampling.max_tokens, 1)  # where none is wanted, the first one ends the request and is not kept
        longest = min(request.num_prompt_tokens + most, self._max_model_len)
        row = self.rows.take(request, num_computed, hit.num_published, longest)
        position, key = self.rows.num_running, self._order_key(request)
        while position and self._order_key(self.rows.request(int(self.rows.running[position - 1]))) > key:
            position -= 1
        self.rows.run(row, position)
        return request

    def preempt(self, request: Request) -> None:
        """Recompute later: blocks go back, tokens stay, and the request waits before all that came after it."""
        request.status = RequestStatus.PREEMPTED
        request.times.num_preemptions += 1
        self.statistics.counters.preemptions += 1
        self.rows.stop_running(request.row)
        self.waiting.push(request)
        self._release_or_defer(request)

    def restart(self, request: Request) -> None:
        """Preempt, and drop also what steps that are out still answer: the KV they read is not to be trusted. Of a request that
        has a row but runs no more, only what they write is left to be kept from others."""
        self.rows.close(request.row)
        self.kv.revoke(request)
        if request.status is RequestStatus.RUNNING:
            self.preempt(request)

    def end(
        self,
        request: Request,
        reason: FinishReason,
        now: float,
        keep: int = -1,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> None:
        """End a live request in whatever state. `keep` >= 0 cuts its output to that many tokens."""
        row, was_running = request.row, request.status is RequestStatus.RUNNING
        if row >= 0:
            self._take_tokens(request)
            self.rows.close(row)
        request.end(reason, keep, stop_reason, error, now)
        del self.requests[request.key]
        choices = self._choices[request.request_id]
        choices.remove(request.choice)
        if not choices:
            del self._choices[request.request_id]
        self.stop_tokens.remove(request)
        self.statistics.finished(reason)
        if was_running:
            self.rows.stop_running(row)
            self._release_or_defer(request)
        else:
            self.waiting.remove_ended()

    def end_unasked(self, request: Request, reason: FinishReason, now: float, **how: str | int | None) -> None:
        """`end`, by the scheduler's own decision: clients are told with the next outputs."""
        self.end(request, reason, now, **how)  # type: ignore[arg-type]
        self.ended_unasked.append(request)

    def release_deferred(self) -> list[Request]:
        """Free what the steps that returned had deferred; returns the requests, ended earlier, whose blocks are free now."""
        deferred, self.deferred = self.deferred, []
        for request in deferred:
            self._release_or_defer(request)
        return [request for request in deferred if request.row < 0 and request.status.finished]

    def is_out(self, row: int) -> bool:
        """A step that has not returned computes this row."""
        return bool(self.rows.last_step[row] > self.returned_step)

    def num_deferred_blocks(self) -> int:
        """Blocks that the return of the steps that are out will free."""
        return sum(self.kv.pool.ref_count(block) == 1 for request in self.deferred for block in request.block_ids)

    def _release_or_defer(self, request: Request) -> None:
        row = request.row
        if self.is_out(row):
            self.deferred.append(request)
            return
        if not request.status.finished:
            self._take_tokens(request)
        self.kv.free(request)
        self.rows.give_back(row)
        self.freed_rows.append(row)

    def _take_tokens(self, request: Request) -> None:
        self.rows.store_tokens(request.row)
        request.times.last_token = float(self.rows.last_token_time[request.row])

    def check_integrity(self) -> None:
        """Raises AssertionError when requests, rows and blocks do not add up."""
        rows = self.rows
        holders = [request for request in rows.requests if request is not None]
        self.kv.pool.check_integrity(request.block_ids for request in holders)
        assert rows.num_free + len(holders) == rows.num_rows, "a row is lost"
        running = [rows.request(int(row)) for row in rows.running]
        assert all(request.status is RequestStatus.RUNNING for request in running), "what runs is not running"
        assert len(running) + len(self.deferred) == len(holders), "a row belongs to nobody"
        assert len(self.waiting) == sum(1 for _ in self.waiting), "the waiting queue is miscounted"
        assert len(running) + len(self.waiting) == len(self.requests), "a request is lost"
        assert sum(map(len, self._choices.values())) == len(self.requests), "a choice is lost"
