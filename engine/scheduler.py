"""The scheduler: which tokens of which requests the next step computes, and what the step's outputs mean for them.

No prefill and no decode phase: each request has tokens, some of them computed, and a step computes more. Running requests come
first, then waiting ones, under one token budget. Plain synchronous code without I/O or a clock. Its time goes with what changed
(requests that came, ended, crossed a block border); what merely goes on is advanced by columns (`engine.rows`).
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np

from engine.config import SchedulerConfig
from engine.draft import PlannedStep, StepDraft
from engine.kv_cache import KVCacheManager
from engine.outputs import StepOutputs, trim_prompt_logprobs
from engine.policy import ORDER_KEYS, WaitingQueue
from engine.protocol import EngineStats, FinishReason
from engine.request import Request, RequestStatus
from engine.rows import Counts, Rows, RowTable
from engine.statistics import SchedulerStatistics
from engine.stops import StopTokens, stop_after
from gpu.plan import Int32Array, ModelRunnerOutput, SchedulerOutput

LOOKAHEAD = 4  # requests kept waiting though nothing is free, so that a freed place is filled in the very next step
TOKENS_PER_PLACE = 128  # a step's budget over this is how many requests may wait: what one step could take in, if short


class BlockedAdmission(NamedTuple):
    """Why the first waiting request was not admitted in the last step."""

    request: Request
    num_tokens: int  # its first chunk
    num_blocks_needed: int  # for the chunk, beyond what the prefix cache answers
    num_blocks_short: int


class Scheduler:
    """`schedule()`, run the plan, `update_from_output()`, in this order; `add_request` and `finish` at any time between.

    One step may be planned ahead: `schedule()` is allowed while one earlier plan is out. What a step that is out may still write
    (blocks, rows) is given back only when it has returned.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
    ) -> None:
        """`config` has its None values resolved; `num_blocks` counts the null block. Raises ValueError for impossible limits."""
        if not (config.max_num_batched_tokens or 0) > 0 < (config.max_num_seqs or 0):
            raise ValueError("max_num_batched_tokens and max_num_seqs must be at least 1")
        assert config.max_num_batched_tokens and config.max_num_seqs
        if not 0 <= config.watermark < 1:
            raise ValueError(f"watermark is a share of the KV blocks, 0 <= watermark < 1, got {config.watermark}")
        self.config = config
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.kv = KVCacheManager(num_blocks, block_size, enable_prefix_caching)
        self.rows = RowTable(config.max_num_seqs, block_size)
        self.waiting = WaitingQueue(config.scheduling_policy)
        self.requests: dict[tuple[str, int], Request] = {}  # live ones
        self.blocked: BlockedAdmission | None = None
        self.statistics = SchedulerStatistics()

        self._order_key = ORDER_KEYS[config.scheduling_policy]
        self._watermark_blocks = int(config.watermark * self.kv.pool.num_usable)
        self._choices: dict[str, list[int]] = {}  # live choices by request id
        self._stop_tokens = StopTokens()
        self._sequence = 0
        self._step = 0
        self._steps_out: deque[PlannedStep] = deque()
        self._returned_step = 0
        self._fenced: list[Request] = []  # off the running order, their rows and blocks in a step that is out
        self._ended_unasked: list[Request] = []  # ended by the scheduler itself, to be told with the next outputs
        self._freed_rows: list[int] = []  # to be told to the workers

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request) -> None:
        """Let a request wait. One that can never run ends at once, with an error in the next outputs. Raises ValueError for a
        live (id, choice)."""
        if request.key in self.requests:
            raise ValueError(f"request {request.request_id} choice {request.choice} is live already")
        self._sequence += 1
        request.sequence = self._sequence
        self.requests[request.key] = request
        self._choices.setdefault(request.request_id, []).append(request.choice)
        self._stop_tokens.add(request)
        self.waiting.push(request)
        if request.num_tokens >= self.max_model_len:
            error = f"prompt of {request.num_tokens} tokens leaves no room for output in a context of {self.max_model_len}"
            self._end_unasked(request, error, request.times.received)

    def finish(
        self,
        request_id: str,
        choice: int,
        reason: FinishReason,
        keep: int = -1,
        stop_reason: int | str | None = None,
        now: float = 0.0,
    ) -> list[Request]:
        """End a choice, or all (-1), in whatever state; returns those that were live. Later output of them is dropped.

        Their blocks are free already, save where a step that is out may write them: those requests come back in `released` of
        the outputs of the step that frees them. `keep` >= 0 cuts the output to that many tokens.
        """
        choices = [choice] if choice >= 0 else sorted(self._choices.get(request_id, ()))
        found = [self.requests[request_id, c] for c in choices if (request_id, c) in self.requests]
        for request in found:
            self._end(request, reason, keep, stop_reason, None, now)
        return found

    def _end(
        self, request: Request, reason: FinishReason, keep: int, stop_reason: int | str | None, error: str | None, now: float
    ) -> None:
        row = request.row
        was = request.status
        if row >= 0:
            self.rows.store_tokens(row)
            request.times.last_token = float(self.rows.last_token_time[row])
        request.end(reason, keep, stop_reason, error, now)
        del self.requests[request.key]
        choices = self._choices[request.request_id]
        choices.remove(request.choice)
        if not choices:
            del self._choices[request.request_id]
        self._stop_tokens.remove(request)
        self.statistics.finished(reason)
        if was is not RequestStatus.RUNNING:
            self.waiting.remove_ended()
        if row >= 0:
            self.rows.mark_ended(row)
            if was is RequestStatus.RUNNING:
                self.rows.stop_running(row)
                self._release_when_returned(request)

    def _end_unasked(self, request: Request, error: str, now: float) -> None:
        self._end(request, FinishReason.ERROR, -1, None, error, now)
        self._ended_unasked.append(request)

    def _release_when_returned(self, request: Request) -> None:
        """Give row and blocks back: now, or when the last step that has the row returns."""
        if self.rows.last_step[request.row] > self._returned_step:
            self._fenced.append(request)
        else:
            self._release(request)

    def _release(self, request: Request) -> None:
        row = request.row
        if not request.status.finished:
            self.rows.store_tokens(row)
            request.times.last_token = float(self.rows.last_token_time[row])
        self.kv.free(request)
        self.rows.give_back(row)
        self._freed_rows.append(row)

    # ------------------------------------------------------------------ plan a step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; counts advance as if it had run. The plan may be empty (total 0): it needs no worker, only
        `update_from_output(plan, None, now)`. Raises RuntimeError when two plans are out."""
        if len(self._steps_out) > 1:
            raise RuntimeError("two steps are out already")
        self._step += 1
        draft = StepDraft(self._step, now, self.max_num_batched_tokens)
        rows, num_tokens = self._schedule_running(draft)
        self.blocked = None
        if draft.num_preempted == 0:
            self._schedule_waiting(draft)
        if draft.new_rows:
            rows = np.concatenate([rows, np.array(draft.new_rows, dtype=np.intp)])
            num_tokens = np.concatenate([num_tokens, np.array(draft.new_num_tokens, dtype=np.int64)])
        return self._commit(draft, rows, num_tokens)

    def _commit(self, draft: StepDraft, rows: Rows, num_tokens: Counts) -> SchedulerOutput:
        table = self.rows
        total = self.max_num_batched_tokens - draft.budget
        freed_rows: list[int] = []
        if total:
            computed = table.num_computed[rows] + num_tokens
            table.num_computed[rows] = computed
            sampling_rows = rows[computed == table.num_tokens[rows]]
            table.num_tokens[sampling_rows] += 1
            table.last_step[rows] = draft.step
            self._steps_out.append(PlannedStep(draft.step, rows, num_tokens, sampling_rows))
            freed_rows, self._freed_rows = self._freed_rows, freed_rows
        self.statistics.step_planned(total)
        return draft.plan(rows, num_tokens, total, freed_rows)

    def _chunk_cap(self) -> int:
        """Most tokens of one request in a step: a long prompt that is alone may have the whole budget."""
        threshold = self.config.long_prefill_token_threshold
        return threshold if 0 < threshold and len(self.requests) > 1 else self.max_num_batched_tokens

    def _schedule_running(self, draft: StepDraft) -> tuple[Rows, Counts]:
        table = self.rows
        rows = table.running.copy()
        known = table.num_tokens[rows]
        computed = table.num_computed[rows]
        num_tokens = np.minimum(known - computed, self._chunk_cap())
        if self._steps_out:  # the last token of a request may be on its way: nothing is left to compute
            num_tokens[known >= table.max_tokens[rows]] = 0
        total = int(num_tokens.sum())
        if total > draft.budget:
            before = num_tokens.cumsum() - num_tokens
            num_tokens = np.clip(draft.budget - before, 0, num_tokens)
        growing = (computed + num_tokens > table.capacity[rows]).nonzero()[0]
        if growing.size:
            num_kept = self._grow(draft, rows, num_tokens, growing)
            rows, num_tokens = rows[:num_kept], num_tokens[:num_kept]
        if rows.size and num_tokens.min() == 0:
            rows, num_tokens = rows[num_tokens > 0], num_tokens[num_tokens > 0]
        draft.budget -= int(num_tokens.sum())
        for index in (num_tokens > 1).nonzero()[0].tolist():
            row = int(rows[index])
            self._announce(table.request(row), int(table.num_computed[row]), int(num_tokens[index]), draft.step)
        return rows, num_tokens

    def _announce(self, request: Request, num_computed: int, num_tokens: int, step: int) -> None:
        first, last = num_computed // self.block_size, (num_computed + num_tokens) // self.block_size
        if last > first:
            self.kv.announce(request, first, last, step)

    def _grow(self, draft: StepDraft, rows: Rows, num_tokens: Counts, growing: Rows) -> int:
        """Blocks for the rows at the indices `growing`; returns how many of `rows` go on running. Lowers `num_tokens` of a row
        that must wait."""
        table = self.rows
        grown = rows[growing]
        missing = -(-(table.num_computed[grown] + num_tokens[growing] - table.capacity[grown]) // self.block_size)
        if missing.sum() > self.kv.pool.num_free:
            return self._grow_by_preemption(draft, rows, num_tokens, growing)
        for row, count in zip(grown.tolist(), missing.tolist(), strict=True):
            draft.grow(row, self.kv.grow(table.request(row), count))
        table.capacity[grown] += missing * self.block_size
        return len(rows)

    def _grow_by_preemption(self, draft: StepDraft, rows: Rows, num_tokens: Counts, growing: Rows) -> int:
        """As `_grow`, where blocks are short. Rows stand in the policy's order, so that the victim is always the last one: the
        least urgent, and one whose tokens this step has not planned yet."""
        table, pool = self.rows, self.kv.pool
        num_kept = len(rows)
        promised = 0  # blocks that a step that is out will free, and that an earlier row waits for
        for index in growing.tolist():
            row = int(rows[index])
            while index < num_kept:
                missing = self.kv.num_blocks_for(int(table.num_computed[row] + num_tokens[index] - table.capacity[row]))
                fitting = int(table.capacity[row] - table.num_computed[row]) + pool.num_free * self.block_size
                if missing <= pool.num_free:
                    draft.grow(row, self.kv.grow(table.request(row), missing))
                    table.capacity[row] += missing * self.block_size
                    break
                if self.config.shrink_chunks and fitting > 0:
                    num_tokens[index] = fitting
                elif self._fenced and (num_kept == 1 or missing + promised <= pool.num_free + self._num_fenced_blocks()):
                    promised += missing
                    num_tokens[index] = 0
                    break
                elif num_kept == 1:
                    self._end_exhausted(row, missing, draft.now)
                    num_kept = 0
                else:
                    num_kept -= 1
                    self._preempt(int(rows[num_kept]))
                    draft.num_preempted += 1
        return num_kept

    def _num_fenced_blocks(self) -> int:
        """Blocks that are free when the steps that are out have returned."""
        return sum(self.kv.pool.ref_count(block) == 1 for request in self._fenced for block in request.block_ids)

    def _end_exhausted(self, row: int, num_missing: int, now: float) -> None:
        request = self.rows.request(row)
        needed = len(request.block_ids) + num_missing
        self._end_unasked(request, self._exhausted(needed), now)

    def _exhausted(self, num_blocks: int) -> str:
        return (
            f"KV cache exhausted: the request alone needs {num_blocks} blocks of {self.block_size} tokens, "
            f"the cache has {self.kv.pool.num_usable}"
        )

    def _preempt(self, row: int) -> None:
        """Recompute later: blocks go back, tokens stay, and the request waits before all that came after it."""
        request = self.rows.request(row)
        request.status = RequestStatus.PREEMPTED
        request.times.num_preemptions += 1
        self.statistics.counters.preemptions += 1
        self.rows.stop_running(row)
        self.waiting.push(request)
        self._release_when_returned(request)

    def _schedule_waiting(self, draft: StepDraft) -> None:
        """Admit from the head of the queue, in order, until budget, rows or blocks are used up: a head that lacks blocks is never
        passed by, so that it cannot starve."""
        while draft.budget > 0 and self.rows.num_free > 0:
            request = self.waiting.peek()
            if request is None or not self._admit(request, draft):
                return

    def _admit(self, request: Request, draft: StepDraft) -> bool:
        """Row and blocks for the whole first chunk, or nothing (False)."""
        pool = self.kv.pool
        longest = self.kv.num_blocks_for(request.num_tokens)
        if longest > pool.num_usable:
            self._end_unasked(request, self._exhausted(longest), draft.now)
            return True
        hit = self.kv.find_hit(request)
        num_computed = len(hit.block_ids) * self.block_size
        num_tokens = min(request.num_tokens - num_computed, draft.budget, self._chunk_cap())
        num_blocks = self.kv.num_blocks_for(num_computed + num_tokens) - len(hit.block_ids)
        reserved = self._watermark_blocks if self.rows.num_running else 0
        available = max(0, pool.num_free - hit.num_free - reserved)
        if num_blocks > available:
            if not (self.config.shrink_chunks and available):
                self.blocked = BlockedAdmission(request, num_tokens, num_blocks, num_blocks - available)
                return False
            num_tokens, num_blocks = available * self.block_size, available
        self.waiting.pop()
        self.kv.admit(request, hit, num_blocks)
        self._start(request, num_computed, hit.num_published, draft.now)
        self._announce(request, num_computed, num_tokens, draft.step)
        draft.admit(request, num_computed, num_tokens)
        return True

    def _start(self, request: Request, num_computed: int, num_published: int, now: float) -> None:
        """A waiting request runs. What the prefix cache gave counts at its first admission only."""
        if request.status is RequestStatus.WAITING:
            request.times.scheduled = now
            request.num_cached_tokens = num_computed
            if self.kv.enable_prefix_caching and not request.wants_prompt_logprobs:
                self.statistics.counters.prefix_cache_queries += request.num_tokens
                self.statistics.counters.prefix_cache_hits += num_computed
        request.status = RequestStatus.RUNNING
        longest = min(request.num_prompt_tokens + request.sampling.max_tokens, self.max_model_len)
        row = self.rows.take(request, num_computed, num_published, longest)
        position, key = self.rows.num_running, self._order_key(request)
        while position and self._order_key(self.rows.request(int(self.rows.running[position - 1]))) > key:
            position -= 1
        self.rows.run(row, position)

    # ------------------------------------------------------------------ take a step's outputs in

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput | None, now: float) -> StepOutputs:
        """Take in the results of the oldest plan that is out (None: of an empty plan). Raises RuntimeError when they are of
        another step, or rows are missing."""
        outputs = StepOutputs()
        if plan.total_num_scheduled_tokens:
            if not self._steps_out or output is None or self._steps_out[0].step != plan.step or output.step != plan.step:
                raise RuntimeError(f"step {plan.step} is not the one whose output is due")
            planned = self._steps_out.popleft()
            self._returned_step = planned.step
            self._take_in(planned, output, outputs, now)
            self.kv.step_returned(planned.step)
            self._release_returned(outputs)
        outputs.finished, self._ended_unasked = self._ended_unasked, []
        return outputs

    def _take_in(self, planned: PlannedStep, output: ModelRunnerOutput, outputs: StepOutputs, now: float) -> None:
        table = self.rows
        self.statistics.counters.last_step_seconds = output.forward_seconds
        table.num_written[planned.rows] += planned.num_tokens
        for row, error in output.failed_rows.items():
            self._fail(row, error, now)
        rows, token_ids = self._live_samples(planned, output)
        positions = table.append_tokens(rows, token_ids)
        offsets = positions - table.num_prompt[rows]
        table.last_token_time[rows] = now
        outputs.clients, outputs.handles, outputs.choices = table.clients[rows], table.handles[rows], table.choices[rows]
        outputs.offsets, outputs.token_ids = offsets.astype(np.int32), token_ids
        self.statistics.counters.generation_tokens += len(rows)
        for row in rows[offsets == 0].tolist():
            self.statistics.counters.prompt_tokens += int(table.num_prompt[row])
            table.request(row).times.first_token = now
        self._publish(planned.rows)
        self._collect_logprobs(output, outputs)
        self._stop(rows, token_ids, positions + 1, now)

    def _live_samples(self, planned: PlannedStep, output: ModelRunnerOutput) -> tuple[Rows, Int32Array]:
        """[num_sampled] rows and their tokens, without those that ended while the step was out."""
        rows, token_ids = planned.sampling_rows, np.asarray(output.token_ids, dtype=np.int32)
        if output.failed_rows:
            rows = rows[~np.isin(rows, list(output.failed_rows))]
        if not np.array_equal(rows, output.rows):
            raise RuntimeError(f"step {planned.step} sampled rows {output.rows.tolist()}, planned were {rows.tolist()}")
        if self._fenced:
            live = ~self.rows.ended[rows]
            rows, token_ids = rows[live], token_ids[live]
        return rows, token_ids

    def _fail(self, row: int, error: str, now: float) -> None:
        request = self.rows.request(row)
        self.kv.distrust(request)
        if not request.status.finished:
            self._end_unasked(request, error, now)

    def _publish(self, rows: Rows) -> None:
        """Store the tokens and publish the blocks of rows that completed a block."""
        table = self.rows
        for row in rows[table.num_written[rows] >= table.next_border[rows]].tolist():
            request = table.requests[row]
            assert request is not None
            first, last = int(table.next_border[row]) // self.block_size - 1, int(table.num_written[row]) // self.block_size
            table.store_tokens(row)
            table.next_border[row] = (last + 1) * self.block_size
            self.kv.publish(request, first, last)

    def _collect_logprobs(self, output: ModelRunnerOutput, outputs: StepOutputs) -> None:
        table = self.rows
        for told in output.logprobs:
            if not table.ended[told.row]:
                offset = int(table.num_known[told.row] - table.num_prompt[told.row]) - 1
                outputs.logprobs.append((table.request(told.row), offset, told))
        for prompt in output.prompt_logprobs:
            if not table.ended[prompt.row]:
                request = table.request(prompt.row)
                fresh = trim_prompt_logprobs(request, prompt)
                if fresh is not None:
                    outputs.prompt_logprobs.append((request, fresh))

    def _stop(self, rows: Rows, token_ids: Int32Array, num_tokens: Counts, now: float) -> None:
        """End the requests whose new token says so."""
        table = self.rows
        suspects = self._stop_tokens.candidates(token_ids) | (num_tokens >= table.max_tokens[rows])
        for index in suspects.nonzero()[0].tolist():
            row, count = int(rows[index]), int(num_tokens[index])
            request = table.request(row)
            num_output = count - request.num_prompt_tokens
            end = stop_after(request, int(token_ids[index]), num_output, count, int(table.max_tokens[row]))
            if end is not None:
                reason, stop_reason = end
                self._end(request, reason, -1, stop_reason, None, now)
                self._ended_unasked.append(request)

    def _release_returned(self, outputs: StepOutputs) -> None:
        waiting, self._fenced = self._fenced, []
        for request in waiting:
            self._release_when_returned(request)
            if request.row < 0 and request.status.finished:
                outputs.released.append(request)

    # ------------------------------------------------------------------ what others ask

    @property
    def has_work(self) -> bool:
        """`schedule` and `update_from_output` have something to do or to tell."""
        return bool(self.requests or self._ended_unasked)

    @property
    def num_free_request_slots(self) -> int:
        """How many requests may be taken from the queue in Redis now. What cannot run soon stays there, in sight and in order:
        while the last step left somebody waiting only a short line is kept, so that a place that falls free is filled at once."""
        num_waiting = len(self.waiting)
        seats = self.max_num_seqs - self.rows.num_running
        if num_waiting:
            return max(0, min(LOOKAHEAD, seats + LOOKAHEAD) - num_waiting)
        return min(seats + LOOKAHEAD, max(LOOKAHEAD, self.max_num_batched_tokens // TOKENS_PER_PLACE))

    def output_token_ids(self, request_id: str, choice: int) -> Int32Array:
        """[num_output_tokens] of a live request so far. Raises KeyError for one that is not live."""
        request = self.requests[request_id, choice]
        if request.row < 0:
            return request.output_token_ids
        return np.frombuffer(self.rows.token_bytes(request.row), dtype=np.int32)[request.num_prompt_tokens :]

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, with nothing done, while any request holds blocks."""
        return self.kv.pool.reset_prefix_cache()

    def stats(self) -> EngineStats:
        pool = self.kv.pool
        return self.statistics.snapshot(
            num_running=self.rows.num_running,
            num_waiting=len(self.waiting),
            num_preempted_waiting=sum(request.status is RequestStatus.PREEMPTED for request in self.waiting),
            kv_cache_usage=1 - pool.num_free / pool.num_usable,
            num_free_blocks=pool.num_free,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, rows or counts do not add up. For idle times and tests."""
        holders = [request for request in self.rows.requests if request is not None]
        self.kv.check_integrity(holders)
        assert self.rows.num_free + len(holders) == self.rows.num_rows, "a row is lost"
        running = [self.rows.request(int(row)) for row in self.rows.running]
        assert all(request.status is RequestStatus.RUNNING for request in running)
        assert len(running) + len(self._fenced) == len(holders), "a row belongs to nobody"
        assert len(running) + len(self.waiting) == len(self.requests), "a request is lost"
