"""The scheduler: it plans the tokens that the next step computes, and takes the outputs of steps in.

No prefill and no decode phase: each request has tokens, some of them computed, and a step computes more. Running requests come
first, then waiting ones, under one token budget. Plain synchronous code without I/O or a clock. Its time goes with what changed
(requests that came, ended, crossed a block border); what merely goes on is advanced by columns (`RowTable`).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from engine.config import SchedulerConfig
from engine.protocol import INVALID_REQUEST, EngineStats, FinishReason
from engine.scheduling.block_growth import BlockGrowth
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.prompt_shares import PromptShares, clip
from engine.scheduling.request import Request, RequestStatus
from engine.scheduling.row_table import Counts, Rows, RowTable
from engine.scheduling.stats import SchedulerStatistics
from engine.scheduling.step_cost import NO_COST, StepCost, StepPace
from engine.scheduling.step_draft import PlannedStep, Room, StepDraft
from engine.scheduling.step_outputs import StepOutputs, trim_prompt_logprobs
from engine.scheduling.stop_check import stop_after
from engine.scheduling.waiting_queue import WaitingQueue
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

    One step may be planned ahead: `schedule()` is allowed while one earlier plan is out. A step that is out may still
    write blocks and rows: they are given back when it has returned.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_size: int,
        num_blocks: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        cost: StepCost = NO_COST,
        pace: StepPace | None = None,
    ) -> None:
        """`config` has its None values resolved; `num_blocks` counts the null block. Prompts are cut so that a step costs what
        `pace` affords, by its `cost`. Raises ValueError for impossible limits."""
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
        self.live = LiveRequests(config.scheduling_policy, max_model_len, self.rows, self.waiting, self.kv)
        self._shares = PromptShares(config.scheduling_policy, self.rows, self.waiting, self.kv)
        self._growth = BlockGrowth(self.rows, self.kv, self.live, config.shrink_chunks)
        self.statistics = SchedulerStatistics()
        self.blocked: BlockedAdmission | None = None
        self._short_of_blocks = False  # the last plan left requests waiting for blocks; read by another thread
        self._watermark_blocks = int(config.watermark * self.kv.pool.num_usable)
        self._cost = cost
        self._pace = pace or StepPace(math.inf)
        self._step = 0
        self._steps_out: deque[PlannedStep] = deque()

    # ------------------------------------------------------------------ requests come and go

    def add_request(self, request: Request, now: float = 0.0) -> None:
        """Let a request wait. One that needs no further token, or has no room for one, ends at once and comes in the next outputs.
        So does one that has ended already. Raises ValueError for a (id, choice) that is live."""
        if request.status.finished:
            self.live.add_ended(request)
            return
        self.live.add(request)
        if request.num_output_tokens:
            self._end_if_complete(request, now)
        elif request.num_tokens >= self.max_model_len:
            error = f"the prompt of {request.num_tokens} tokens leaves no room for output in a context of {self.max_model_len}"
            self.live.end(request, FinishReason.ERROR, request.times.received, error=INVALID_REQUEST + error)

    def _end_if_complete(self, request: Request, now: float) -> None:
        """The last token that another engine sampled may be the last of all."""
        last = int(request.output_token_ids[-1])
        end = stop_after(request, last, request.num_output_tokens, request.num_tokens, self.live.most_tokens(request))
        if end is not None:
            self.live.end(request, end[0], now, stop_reason=end[1])

    def finish(
        self,
        request_id: str,
        choice: int,
        reason: FinishReason,
        keep: int = -1,
        stop_reason: int | str | None = None,
        error: str | None = None,
        now: float = 0.0,
    ) -> None:
        """End a choice, or all (-1), in any state, as far as they live. Later output of them is dropped. `keep` >= 0 cuts the
        output to that many tokens. As all ends do, these come in the outputs of the step that frees their blocks."""
        for request in self.live.find(request_id, choice):
            self.live.end(request, reason, now, keep, stop_reason, error)

    # ------------------------------------------------------------------ plan a step

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan the next step; counts advance as if it had run. The plan may be empty (total 0): it needs no worker, only
        `update_from_output(plan, None, now)`. Raises RuntimeError when two plans are out."""
        if len(self._steps_out) > 1:
            raise RuntimeError("two steps are out already")
        self._step += 1
        draft = self._make_draft(now)
        rows, num_tokens = self._schedule_running(draft)
        self.blocked = None
        if draft.num_preempted == 0:
            self._schedule_waiting(draft)
        self._short_of_blocks = self.blocked is not None or draft.num_preempted > 0
        if draft.new_rows:
            rows = np.concatenate([rows, np.array(draft.new_rows, dtype=np.intp)])
            num_tokens = np.concatenate([num_tokens, np.array(draft.new_num_tokens, dtype=np.int64)])
        return self._commit(draft, rows, num_tokens)

    def _make_draft(self, now: float) -> StepDraft:
        limits = (self.max_num_batched_tokens, self._pace.affordable, self._cost, self._cost.per_step)
        return StepDraft(self._step, now, Room(*limits), Room(*limits))

    def _schedule_running(self, draft: StepDraft) -> tuple[Rows, Counts]:
        table = self.rows
        rows = table.running.copy()
        known = table.num_tokens[rows]
        computed = table.num_computed[rows]
        most = self._chunk_cap()
        num_tokens = np.minimum(known - computed, most)
        if self._steps_out:  # the last token of a request may be on its way: nothing is left to compute
            num_tokens[known >= table.max_tokens[rows]] = 0
        any_prompts = (num_tokens > 1).any()
        if any_prompts or (len(self.waiting) and table.num_free):
            num_tokens = self._shares.divide(draft, rows, num_tokens, computed, most)
        elif int(num_tokens.sum()) > draft.room.tokens:
            num_tokens = clip(num_tokens, draft.room.tokens)
        num_kept = self._growth.grow(draft, rows, computed, num_tokens)
        if num_kept < len(rows) or (num_kept and num_tokens.min() == 0):
            self.statistics.counters.preemptions += draft.num_preempted
            kept = num_tokens[:num_kept].nonzero()[0]
            rows, computed, num_tokens = rows[kept], computed[kept], num_tokens[kept]
        draft.room.take_all(num_tokens, computed)
        if any_prompts:
            for row, start, count in zip(rows.tolist(), computed.tolist(), num_tokens.tolist(), strict=True):
                if count > 1:
                    self.kv.announce(table.request(row), start, count, draft.step)
        return rows, num_tokens

    def _schedule_waiting(self, draft: StepDraft) -> None:
        """Admit from the head of the queue, in order, until budget, rows or blocks are used up. No request passes a head that lacks
        blocks, so that it cannot starve. Where prompts share the step, those that got a part come first."""
        for sharer in list(draft.parts):
            if not self.rows.num_free or not self._admit(sharer, draft):
                return
        while draft.room.tokens > 0 and self.rows.num_free > 0:
            request = self.waiting.peek()
            if request is None or not self._admit(request, draft):
                return

    def _admit(self, request: Request, draft: StepDraft) -> bool:
        """Row and blocks for the whole first chunk, or nothing (False)."""
        if request.row >= 0:  # preempted in a step that is still out: its last token may be on its way
            return False
        pool = self.kv.pool
        longest = self.kv.num_blocks_for(request.num_tokens)
        if longest > pool.num_usable:
            self.live.end(request, FinishReason.ERROR, draft.now, error=self.kv.exhausted(longest))
            return True
        hit = self.kv.find_hit(request)
        num_computed = len(hit.block_ids) * self.block_size
        num_tokens = draft.part_of(request, num_computed, min(request.num_tokens - num_computed, self._chunk_cap()))
        if num_tokens == 0:
            return False
        num_blocks = self.kv.num_blocks_for(num_computed + num_tokens) - len(hit.block_ids)
        reserved = self._watermark_blocks if self.rows.num_running else 0
        available = max(0, pool.num_free - hit.num_free - reserved)
        if num_blocks > available:
            if not (self.config.shrink_chunks and available):
                self.blocked = BlockedAdmission(request, num_tokens, num_blocks, num_blocks - available)
                return False
            num_tokens, num_blocks = available * self.block_size, available
        if request.status is RequestStatus.WAITING:
            self._note_first_admission(request, num_computed, draft.now)
        self.live.start(request, hit, num_blocks)
        self.kv.announce(request, num_computed, num_tokens, draft.step)
        draft.admit(request, num_computed, num_tokens)
        return True

    def _note_first_admission(self, request: Request, num_cached: int, now: float) -> None:
        """A prefix hit counts here only, so that a preempted request does not look like cached traffic."""
        request.times.scheduled = now
        request.num_cached_tokens = num_cached
        if self.kv.reads_cache(request):
            self.statistics.counters.prefix_cache_queries += request.num_tokens
            self.statistics.counters.prefix_cache_hits += num_cached

    def _chunk_cap(self) -> int:
        """Most tokens of one request in a step: a long prompt that is alone may have the whole budget."""
        threshold = self.config.long_prefill_token_threshold
        return threshold if 0 < threshold and len(self.live) > 1 else self.max_num_batched_tokens

    def _commit(self, draft: StepDraft, rows: Rows, num_tokens: Counts) -> SchedulerOutput:
        table = self.rows
        total = self.max_num_batched_tokens - draft.room.tokens
        freed_rows: list[int] = []
        if total:
            computed = table.num_computed[rows] + num_tokens
            table.num_computed[rows] = computed
            sampling_rows = rows[computed == table.num_tokens[rows]]
            table.num_tokens[sampling_rows] += 1
            table.last_step[rows] = draft.step
            self._steps_out.append(PlannedStep(draft.step, rows, num_tokens, sampling_rows, draft.room.seconds))
            freed_rows = self.live.take_freed_rows()
        self.statistics.step_planned(total)
        return draft.plan(rows, num_tokens, total, freed_rows)

    # ------------------------------------------------------------------ take a step's outputs in

    def update_from_output(self, plan: SchedulerOutput, output: ModelRunnerOutput | None, now: float) -> StepOutputs:
        """Take in the results of the oldest plan that is out (None: of an empty plan). Raises RuntimeError when they are of
        another step, or rows are missing."""
        outputs = StepOutputs()
        if plan.total_num_scheduled_tokens:
            if not self._steps_out or output is None or self._steps_out[0].step != plan.step or output.step != plan.step:
                raise RuntimeError(f"step {plan.step} is not the one whose output is due")
            planned = self._steps_out.popleft()
            self._pace.observe(planned.seconds, output.forward_seconds, output.num_threads)
            self._take_in(planned, output, outputs, now)
            self.kv.step_returned(planned.step)
            self.live.step_returned(planned.step)
        outputs.finished = self.live.take_ended()
        for request in outputs.finished:
            self.statistics.finished(request)
        return outputs

    def _take_in(self, planned: PlannedStep, output: ModelRunnerOutput, outputs: StepOutputs, now: float) -> None:
        table = self.rows
        if output.failed_rows:
            self._fail(planned, output.failed_rows, now)
        before, prompts = table.num_written[planned.rows], table.num_prompt[planned.rows]
        table.num_written[planned.rows] = after = before + planned.num_tokens
        rows, token_ids = self._live_samples(planned, output)
        positions = table.append_tokens(rows, token_ids)
        offsets = positions - table.num_prompt[rows]
        table.last_token_time[rows] = now
        outputs.clients, outputs.handles, outputs.choices = table.clients[rows], table.handles[rows], table.choices[rows]
        outputs.offsets, outputs.token_ids = offsets.astype(np.int32), token_ids
        of_prompts = before < prompts
        num_prompt_tokens = int((np.minimum(after, prompts) - before)[of_prompts].sum()) if of_prompts.any() else 0
        self.statistics.step_returned(num_prompt_tokens, len(rows), output.forward_seconds)
        for row in rows[offsets == 0].tolist():
            request = table.request(row)
            self.statistics.first_token(request)
            request.times.first_token = now
            outputs.started.append(request)
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
        if self.live.any_deferred or output.failed_rows:
            live = ~self.rows.closed[rows]
            rows, token_ids = rows[live], token_ids[live]
        return rows, token_ids

    def _fail(self, planned: PlannedStep, failed_rows: dict[int, str], now: float) -> None:
        """End the requests of rows that failed, whose KV of this step is wrong.

        A request that shares such KV, because it came in the same step or the next, computes anew, and its output of these steps is
        dropped. The same holds for the sharers of its own blocks.
        """
        table = self.rows
        spoiled: set[int] = set()
        for row in planned.rows[np.isin(planned.rows, list(failed_rows))].tolist():
            spoiled.update(table.unwritten_blocks(row))
        for row, error in failed_rows.items():
            request = table.request(row)
            self.kv.distrust(request)
            if not request.status.finished:
                self.live.end(request, FinishReason.ERROR, now, error=error)
        suspects = [request for request in table.requests if request is not None and request.row not in failed_rows]
        while sharers := [request for request in suspects if not spoiled.isdisjoint(request.block_ids)]:
            suspects = [request for request in suspects if request not in sharers]
            for sharer in sharers:
                spoiled.update(table.unwritten_blocks(sharer.row))
                self.live.drop_output(sharer)
                if sharer.status is RequestStatus.RUNNING:  # else only what it writes is left to be kept from others
                    self.statistics.counters.preemptions += 1
                    self.live.preempt(sharer)

    def _publish(self, rows: Rows) -> None:
        """Store the tokens and publish the blocks of rows that completed a block."""
        table = self.rows
        rows = rows[table.num_written[rows] >= table.next_border[rows]]
        if not rows.size:
            return
        first, last = table.next_border[rows] // self.block_size - 1, table.num_written[rows] // self.block_size
        table.next_border[rows] = (last + 1) * self.block_size
        for request, begin, end in zip(table.store_blocks(rows), first.tolist(), last.tolist(), strict=True):
            self.kv.publish(request, begin, end)

    def _collect_logprobs(self, output: ModelRunnerOutput, outputs: StepOutputs) -> None:
        table = self.rows
        for told in output.logprobs:
            if not table.closed[told.row]:
                offset = int(table.num_known[told.row] - table.num_prompt[told.row]) - 1
                outputs.logprobs.append((table.request(told.row), offset, told))
        for prompt in output.prompt_logprobs:
            if not table.closed[prompt.row]:
                request = table.request(prompt.row)
                fresh = trim_prompt_logprobs(request, prompt)
                if fresh is not None:
                    outputs.prompt_logprobs.append((request, fresh))

    def _stop(self, rows: Rows, token_ids: Int32Array, num_tokens: Counts, now: float) -> None:
        """End the requests whose new token says so."""
        table = self.rows
        suspects = self.live.may_end(token_ids) | (num_tokens >= table.max_tokens[rows])
        for index in suspects.nonzero()[0].tolist():
            row, count = int(rows[index]), int(num_tokens[index])
            request = table.request(row)
            num_output = count - request.num_prompt_tokens
            end = stop_after(request, int(token_ids[index]), num_output, count, int(table.max_tokens[row]))
            if end is not None:
                reason, stop_reason = end
                self.live.end(request, reason, now, stop_reason=stop_reason)

    # ------------------------------------------------------------------ what others ask

    @property
    def requests(self) -> Mapping[tuple[str, int], Request]:
        """Live requests by (id, choice)."""
        return self.live.by_key

    @property
    def has_work(self) -> bool:
        """`schedule` and `update_from_output` have something to do or to tell."""
        return len(self.live) > 0 or self.live.any_ended

    @property
    def step_forecast(self) -> float:
        """Seconds that the longest step now out should take, by the steps before it; 0: none can be foretold."""
        return max((planned.seconds for planned in self._steps_out), default=0.0) * self._pace.mean

    @property
    def num_free_request_slots(self) -> int:
        """How many choices may be taken from the queue in Redis now.

        Requests that cannot run soon stay there, visible and in order. While the last step left requests waiting, the engine keeps
        only a short line, so that a freed place is filled at once.
        """
        num_waiting = len(self.waiting)
        if self.has_work and self.num_free_tokens <= 0:
            return 0
        seats = self.max_num_seqs - self.rows.num_running
        if num_waiting:
            return max(0, LOOKAHEAD - num_waiting)
        return min(seats + LOOKAHEAD, max(LOOKAHEAD, self.max_num_batched_tokens // TOKENS_PER_PLACE))

    @property
    def num_free_places(self) -> int:
        """How many more choices could run than are here: the free rows, and none while one waits for KV blocks. An estimate: the
        prompts of the others are not known."""
        num_waiting = len(self.waiting)
        if num_waiting and self._short_of_blocks:
            return 0
        return max(0, self.max_num_seqs - self.rows.num_running - num_waiting)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that free KV blocks could take of further prompts: behind the rest of those that run, a block for each of
        them to go on, and the prompts that wait. Negative where those are short. An estimate, read from another thread."""
        free = (self.kv.pool.num_free - self.rows.num_running) * self.block_size
        return free - self.rows.num_without_blocks - self.waiting.num_prompt_tokens

    def output_token_ids(self, request_id: str, choice: int, offset: int = 0) -> Int32Array:
        """[num_output_tokens - offset] of a live request so far. Raises KeyError for one that is not live."""
        request = self.requests[request_id, choice]
        if request.row < 0:
            return request.output_token_ids[offset:]
        return np.frombuffer(self.rows.token_bytes(request.row, request.num_prompt_tokens + offset), dtype=np.int32)

    def readdress(self, request: Request, client: int, handle: int) -> None:
        """Outputs of a request in any state go to another API server from now on."""
        request.client, request.handle = client, handle
        if request.row >= 0:
            self.rows.clients[request.row], self.rows.handles[request.row] = client, handle

    def num_output_tokens(self, request: Request) -> int:
        """Of a request in any state, so far."""
        if request.row < 0 or request.status.finished:
            return request.num_output_tokens
        return int(self.rows.num_known[request.row]) - request.num_prompt_tokens

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
            step_slowdown=self._pace.mean,
        )

    def check_integrity(self) -> None:
        """Raises AssertionError when blocks, rows or counts do not add up. For idle times and tests."""
        self.live.check_integrity()
