"""A worker's view of its requests: one row each in tables indexed by row, changed by the differences that a step brings.

Tables live on the host as numpy arrays; a step gathers from them what model and sampler need, without a Python loop over rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from gpu.models.attention import AttentionMetadata
from gpu.plan import INVALID_REQUEST, Int32Array, NewRequest, SchedulerOutput
from gpu.runner.sampling_table import SamplingTable
from gpu.runner.token_rules import Histories

OVERRUN = 16  # positions beyond max_model_len that a row may touch: steps planned before its end was known


@dataclass
class Step:
    """One step's input. `sampled` are the places in `rows` that sample; arrays on the host, tensors on the device."""

    rows: Int32Array  # [num_scheduled]
    query_lens: Int32Array  # [num_scheduled]
    query_start: Int32Array  # [num_scheduled + 1]
    token_ids: torch.Tensor  # [num_tokens] int64
    positions: torch.Tensor  # [num_tokens] int64
    attention: AttentionMetadata
    sampled: np.ndarray  # [num_sampled] int64

    @property
    def sampled_rows(self) -> Int32Array:
        rows: Int32Array = self.rows[self.sampled]
        return rows

    @property
    def last_tokens(self) -> np.ndarray:
        """[num_sampled] the index among the step's tokens of each sampling row's last."""
        last: np.ndarray = self.query_start[self.sampled + 1].astype(np.int64) - 1
        return last


class Batch:
    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int, vocab_size: int, device: torch.device) -> None:
        longest = max_model_len + OVERRUN
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.device = device
        # Zeros, not empty: memory of rows never used is never mapped, and an unknown token is a valid one.
        self.token_ids = np.zeros((max_num_seqs, longest), np.int32)
        self.block_tables = np.zeros((max_num_seqs, -(-longest // block_size)), np.int32)
        self.num_blocks = np.zeros(max_num_seqs, np.int32)
        self.num_tokens = np.zeros(max_num_seqs, np.int32)  # known; 0: the row is free
        self.num_prompt_tokens = np.zeros(max_num_seqs, np.int32)
        self.num_computed = np.zeros(max_num_seqs, np.int32)
        self.histories = Histories(self.token_ids, self.num_tokens, self.num_prompt_tokens)
        self.sampling = SamplingTable(max_num_seqs, vocab_size)
        self.failed_rows: dict[int, str] = {}  # why; until they are freed, because steps planned before go on computing them

    def apply(self, plan: SchedulerOutput) -> None:
        """Frees rows, takes new requests, appends blocks."""
        for row in plan.freed_rows:
            self.num_tokens[row] = 0
            self.sampling.clear(row)
            self.failed_rows.pop(row, None)
        for request in plan.new_requests:
            self._take(request)
        self._grow(plan.grown_rows, plan.grown_blocks)

    def _grow(self, rows: Int32Array, blocks: Int32Array) -> None:
        """A row may be named more than once: each of its blocks goes behind the one before."""
        order = rows.argsort(kind="stable")
        rows = rows[order]
        nth = np.arange(len(rows)) - rows.searchsorted(rows)  # of the row's own
        self.block_tables[rows, self.num_blocks[rows] + nth] = blocks[order]
        np.add.at(self.num_blocks, rows, 1)

    def _take(self, request: NewRequest) -> None:
        row, token_ids = request.row, request.token_ids
        length = len(token_ids)
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            self.failed_rows[row] = f"{INVALID_REQUEST}a token id of the prompt is outside the vocabulary of {self.vocab_size}"
            token_ids = np.zeros_like(token_ids)
        self.token_ids[row, :length] = token_ids
        self.num_tokens[row] = length
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed[row] = request.num_computed_tokens
        self.num_blocks[row] = len(request.block_ids)
        self.block_tables[row, : len(request.block_ids)] = request.block_ids
        if (reason := self._set_sampling(request)) is not None:
            self.failed_rows[row] = reason

    def _set_sampling(self, request: NewRequest) -> str | None:
        """None, or the reason why the row cannot be sampled. Bad parameters fail this row and no other."""
        try:
            return self.sampling.set(request.row, request.sampling, request.seed)
        except Exception as error:
            return f"{INVALID_REQUEST}its sampling parameters are out of range: {error}"

    def make_step(self, plan: SchedulerOutput) -> Step:
        rows, query_lens = plan.rows, plan.num_scheduled_tokens
        computed = self.num_computed[rows]
        query_start = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(query_lens, out=query_start[1:])
        row_of_token = np.repeat(rows, query_lens)
        positions = np.arange(query_start[-1], dtype=np.int64) + np.repeat(computed - query_start[:-1], query_lens)
        blocks = self.block_tables[row_of_token, positions // self.block_size].astype(np.int64)
        context_lens = computed + query_lens
        attention = self._attention(rows, query_start, context_lens, blocks * self.block_size + positions % self.block_size)
        return Step(
            rows=rows,
            query_lens=query_lens,
            query_start=query_start,
            token_ids=self._send(self.token_ids[row_of_token, positions].astype(np.int64)),
            positions=self._send(positions),
            attention=attention,
            sampled=np.flatnonzero(context_lens == self.num_tokens[rows]),
        )

    def _attention(
        self, rows: Int32Array, query_start: Int32Array, context_lens: Int32Array, slots: np.ndarray
    ) -> AttentionMetadata:
        tables = self.block_tables
        if self.device.type != "cpu":  # only what the step reads crosses to the device
            tables = tables[rows, : -(-int(context_lens.max()) // self.block_size)]
            rows = np.arange(len(rows), dtype=np.int32)
        return AttentionMetadata(
            block_tables=self._send(tables),
            rows=self._send(rows),
            query_start=self._send(query_start),
            context_lens=self._send(context_lens),
            slots=self._send(slots),
        )

    def failed_of(self, step: Step) -> dict[int, str]:
        """Those of the step's rows that failed, in it or before, and why."""
        return {row: self.failed_rows[row] for row in step.rows.tolist() if row in self.failed_rows} if self.failed_rows else {}

    def advance(self, step: Step, token_ids: Int32Array) -> None:
        """After a step: its tokens are computed, and each sampling row knows one token more, token_ids [num_sampled]. So does a
        failed one, as the next step's plan supposes, though its token is not published."""
        self.num_computed[step.rows] += step.query_lens
        rows = step.sampled_rows
        self.token_ids[rows, self.num_tokens[rows]] = token_ids
        self.num_tokens[rows] += 1

    def _send(self, x: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(np.require(x, requirements="W"))  # columns off the wire are read-only, which torch refuses
        return tensor if self.device.type == "cpu" else tensor.to(self.device, non_blocking=True)
