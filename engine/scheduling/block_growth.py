"""Blocks for the next tokens of running requests, and preemption where blocks are short."""

from __future__ import annotations

from engine.protocol import FinishReason
from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.live_requests import LiveRequests
from engine.scheduling.row_table import Counts, Rows, RowTable
from engine.scheduling.step_draft import StepDraft


class BlockGrowth:
    """Works on the scheduler's tables and keeps nothing."""

    def __init__(self, rows: RowTable, kv: KVCacheManager, live: LiveRequests, shrink_chunks: bool) -> None:
        self._rows = rows
        self._kv = kv
        self._live = live
        self._shrink_chunks = shrink_chunks

    def grow(self, draft: StepDraft, rows: Rows, computed: Counts, num_tokens: Counts) -> int:
        """Blocks for `num_tokens` tokens of each of `rows` behind the `computed` ones; returns how many of the rows go on running,
        the first ones. Lowers `num_tokens` of a row that must wait."""
        table = self._rows
        growing = (computed + num_tokens > table.capacity[rows]).nonzero()[0]
        if not growing.size:
            return len(rows)
        grown = rows[growing]
        missing = -(-(computed[growing] + num_tokens[growing] - table.capacity[grown]) // table.block_size)
        if missing.sum() > self._kv.pool.num_free:
            return self._grow_by_preemption(draft, rows, num_tokens, growing)
        blocks = self._kv.grow_all([table.request(row) for row in grown.tolist()], missing.tolist())
        draft.grow(grown.repeat(missing).tolist(), blocks)
        table.capacity[grown] += missing * table.block_size
        return len(rows)

    def _grow_by_preemption(self, draft: StepDraft, rows: Rows, num_tokens: Counts, growing: Rows) -> int:
        """For the rows at the indices `growing`, in order. Rows stand in the policy's order, so that the victim is always the last
        one: the least urgent, and one whose tokens this step has not planned yet."""
        table, pool = self._rows, self._kv.pool
        num_kept = len(rows)
        promised = 0  # blocks that a step that is out will free, and that an earlier row waits for
        for index in growing.tolist():
            row = int(rows[index])
            while index < num_kept:
                missing = self._kv.num_blocks_for(int(table.num_computed[row] + num_tokens[index] - table.capacity[row]))
                fitting = int(table.capacity[row] - table.num_computed[row]) + pool.num_free * table.block_size
                if missing <= pool.num_free:
                    draft.grow([row] * missing, self._kv.grow_all([table.request(row)], [missing]))
                    table.capacity[row] += missing * table.block_size
                    break
                if self._shrink_chunks and fitting > 0:
                    num_tokens[index] = fitting
                elif self._soon_free(row, missing + promised, alone=num_kept == 1):
                    promised += missing
                    num_tokens[index] = 0
                    break
                elif num_kept == 1:
                    error = self._kv.exhausted(len(table.request(row).block_ids) + missing)
                    self._live.end(table.request(row), FinishReason.ERROR, draft.now, error=error)
                    num_kept = 0
                else:
                    num_kept -= 1
                    self._live.preempt(table.request(int(rows[num_kept])))
                    draft.num_preempted += 1
        return num_kept

    def _soon_free(self, row: int, num_blocks: int, alone: bool) -> bool:
        """A step that is out will free the blocks that a row lacks, so that no request need be preempted. A row that is alone
        waits for anything that may still come, its own last token included."""
        if alone:
            return self._live.any_deferred or self._live.is_out(row)
        return self._live.any_deferred and num_blocks <= self._kv.pool.num_free + self._live.num_deferred_blocks()
