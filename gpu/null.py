"""A model runner without a model: it keeps rows as the real one does; its tokens depend on seed and position alone. Torch-free.

Chosen by `load_format="null"`, for tests of everything around the model and for measuring what headrace itself costs.
It checks each step against the contract of `gpu.plan` and raises ValueError for a plan that breaks it, so that a mistake of the
scheduler shows.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu.config import Capacity, WorkerConfig
from gpu.plan import (
    INVALID_REQUEST,
    Int32Array,
    ModelRunnerOutput,
    NewRequest,
    PromptLogprobs,
    SampledLogprobs,
    SamplingParams,
    SchedulerOutput,
)

ENVIRONMENT_VARIABLE = "HEADRACE_NULL_RUNNER"
BYTES_PER_TOKEN = 1024  # what a token's KV is said to take; nothing is allocated


@dataclass(frozen=True)
class NullSettings:
    """How the null runner behaves, read from `HEADRACE_NULL_RUNNER="name=value,..."`."""

    vocab_size: int = 49152
    lowest_token_id: int = 256  # ids below it (special tokens in most vocabularies) are not sampled
    eos_after: int = 0  # output tokens after which a request gets its end-of-sequence token; 0: never
    max_model_len: int = 8192
    kv_bytes: int = 1 << 30
    load_seconds: float = 0.0
    step_seconds: float = 0.0
    fail_while: str = ""  # "load" or "execute": raise there
    fail_rank: int = 0
    fail_step: int = 0  # the first step that raises
    hang_step: int = 0  # the first step that never returns; 0: none
    fail_seed: int = -1  # a request with this seed (>= 0) fails alone, by `failed_rows`, at its first output token

    @classmethod
    def from_environment(cls) -> NullSettings:
        """Raises ValueError for a name that is not a setting, msgspec.ValidationError for a value that is not of its type."""
        items = [item.partition("=") for item in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if item.strip()]
        values = {name.strip(): value.strip() for name, _, value in items}
        names = {field.name for field in fields(cls)}
        if unknown := values.keys() - names:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(names))}"
            )
        return msgspec.convert(values, cls, strict=False)


def null_tokens(seeds: NDArray[np.uint64], positions: NDArray[np.uint64], lowest: int, vocab_size: int) -> Int32Array:
    """Token ids in [lowest, vocab_size) by the finalizer of SplitMix64 over (seed, position); all arrays [num_rows]."""
    mixed = seeds * np.uint64(0xD1342543DE82EF95) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    ids: Int32Array = (np.uint64(lowest) + mixed % np.uint64(vocab_size - lowest)).astype(np.int32)
    return ids


class NullRunner:
    """ModelRunner's interface; under tensor parallel each rank computes alone."""

    def __init__(self, config: WorkerConfig, rank: int = 0, settings: NullSettings | None = None) -> None:
        self.config = config
        self.rank = rank
        self.settings = settings or NullSettings.from_environment()
        self.lowest_token_id = min(self.settings.lowest_token_id, self.settings.vocab_size - 1)
        rows = config.max_num_seqs
        self.num_tokens = np.zeros(rows, np.int64)  # 0: the row is free
        self.num_computed = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.num_blocks_held = np.zeros(rows, np.int64)
        self.seeds = np.zeros(rows, np.uint64)
        self.careful = np.zeros(rows, np.bool_)  # more than the next hash is to be done for the row
        self.sampling = [SamplingParams()] * rows
        self.prompts: dict[int, Int32Array] = {}  # of rows that want prompt logprobs
        self.num_blocks = 0
        self.max_model_len = 0

    def load(self, progress: Callable[[float], None]) -> None:
        parts = 4
        for part in range(parts):
            progress(part / parts)
            if self.settings.load_seconds:
                time.sleep(self.settings.load_seconds / parts)
            if part == 1 and self._fails_while("load"):
                raise RuntimeError(f"failure while loading, as {ENVIRONMENT_VARIABLE} orders")
        progress(1.0)

    def capacity(self) -> Capacity:
        settings = self.settings
        return Capacity(
            max_model_len=settings.max_model_len,
            vocab_size=settings.vocab_size,
            dtype="null",
            device="cpu",
            weight_bytes=0,
            block_bytes=self.config.cache.block_size * BYTES_PER_TOKEN,
            available_kv_bytes=self.config.cache.kv_cache_memory_bytes or settings.kv_bytes,
            fingerprint=f"null-{settings.vocab_size}-{settings.lowest_token_id}-{settings.eos_after}",
        )

    def allocate_kv(self, num_blocks: int, max_model_len: int) -> None:
        self.num_blocks = num_blocks
        self.max_model_len = max_model_len

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        started = time.perf_counter()
        if self._fails_while("execute") and plan.step >= self.settings.fail_step:
            raise RuntimeError(f"failure in step {plan.step}, as {ENVIRONMENT_VARIABLE} orders")
        if 0 < self.settings.hang_step <= plan.step:
            threading.Event().wait()
        if self.settings.step_seconds and plan.total_num_scheduled_tokens:
            time.sleep(self.settings.step_seconds)
        self._apply(plan)
        prompt_logprobs = [
            entry for row, count in self._rows_with_prompt_logprobs(plan) if (entry := self._prompt_logprobs(row, count))
        ]
        self.num_computed[plan.rows] += plan.num_scheduled_tokens
        rows = plan.rows[self.num_computed[plan.rows] == self.num_tokens[plan.rows]]
        token_ids = null_tokens(
            self.seeds[rows], self.num_tokens[rows].astype(np.uint64), self.lowest_token_id, self.settings.vocab_size
        )
        self.num_tokens[rows] += 1
        logprobs, failed_rows = self._treat_careful_rows(rows, token_ids)
        if failed_rows:
            kept = ~np.isin(rows, list(failed_rows))
            rows, token_ids = rows[kept], token_ids[kept]
        return ModelRunnerOutput(plan.step, rows, token_ids, logprobs, prompt_logprobs, failed_rows, time.perf_counter() - started)

    def compile_grammar(self, grammar: str) -> Future[str]:
        compiled: Future[str] = Future()
        compiled.set_result(f"{INVALID_REQUEST}the null model has no tokenizer that a grammar could be about")
        return compiled

    def rest(self) -> None:
        pass

    def _fails_while(self, phase: str) -> bool:
        return self.settings.fail_while == phase and self.settings.fail_rank == self.rank

    def _fails_alone(self, row: int) -> bool:
        return self.settings.fail_seed >= 0 and int(self.seeds[row]) == self.settings.fail_seed

    def _apply(self, plan: SchedulerOutput) -> None:
        """Free, take, grow, in this order; then what is to be computed must be known and have a block."""
        self.num_tokens[plan.freed_rows] = 0
        for row in plan.freed_rows:
            self.prompts.pop(row, None)
        for request in plan.new_requests:
            self._take(request)
        self._expect_blocks(plan.grown_blocks)
        np.add.at(self.num_blocks_held, plan.grown_rows, 1)
        after = self.num_computed[plan.rows] + plan.num_scheduled_tokens
        _expect(int(plan.num_scheduled_tokens.sum()) == plan.total_num_scheduled_tokens, "the sum of scheduled tokens is wrong")
        _expect(plan.total_num_scheduled_tokens <= self.config.max_num_batched_tokens, "more tokens than the budget")
        _expect(bool((plan.num_scheduled_tokens > 0).all()), "a row is scheduled with no token")
        _expect(np.unique(plan.rows).size == plan.rows.size, "a row is scheduled twice")
        _expect(bool((after <= self.num_tokens[plan.rows]).all()), "a row is to compute tokens that are not known")
        room = self.num_blocks_held * self.config.cache.block_size
        _expect(bool((after <= room[plan.rows]).all()), "a row is to compute tokens that have no block")

    def _take(self, request: NewRequest) -> None:
        row = request.row
        _expect(self.num_tokens[row] == 0, f"row {row} is taken")
        _expect(0 <= request.num_computed_tokens < request.token_ids.size, f"row {row} comes with all its tokens computed")
        _expect(request.token_ids.size <= self.max_model_len, f"row {row} is longer than the model's length")
        self._expect_blocks(request.block_ids)
        self.num_tokens[row] = request.token_ids.size
        self.num_computed[row] = request.num_computed_tokens
        self.num_prompt[row] = request.num_prompt_tokens
        self.num_blocks_held[row] = request.block_ids.size
        self.seeds[row] = request.seed & 0xFFFFFFFFFFFFFFFF
        self.sampling[row] = sampling = request.sampling
        could_end = max([*sampling.eos_token_ids, *sampling.stop_token_ids], default=-1) >= self.lowest_token_id
        self.careful[row] = could_end or self.settings.eos_after > 0 or sampling.logprobs is not None or self._fails_alone(row)
        if sampling.prompt_logprobs is not None:
            self.prompts[row] = request.token_ids[: request.num_prompt_tokens]

    def _expect_blocks(self, block_ids: Int32Array) -> None:
        if block_ids.size:
            _expect(0 < block_ids.min() and block_ids.max() < self.num_blocks, "a block that does not exist, or the null block")

    def _rows_with_prompt_logprobs(self, plan: SchedulerOutput) -> list[tuple[int, int]]:
        """(row, scheduled tokens) each."""
        if not self.prompts:
            return []
        pairs = zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        return [(row, count) for row, count in pairs if row in self.prompts]

    def _treat_careful_rows(self, rows: Int32Array, token_ids: Int32Array) -> tuple[list[SampledLogprobs], dict[int, str]]:
        """Ends and stops put into (or kept out of) `token_ids` [num_sampled] in place; logprobs; rows that fail."""
        logprobs: list[SampledLogprobs] = []
        failed: dict[int, str] = {}
        for index in np.flatnonzero(self.careful[rows]).tolist():
            row = int(rows[index])
            sampling = self.sampling[row]
            if self._fails_alone(row):
                failed[row] = f"seed {self.settings.fail_seed} fails, as {ENVIRONMENT_VARIABLE} orders"
                continue
            num_output = int(self.num_tokens[row] - self.num_prompt[row]) - 1  # before this token
            token_ids[index] = self._end_or_not(int(token_ids[index]), num_output, sampling)
            if sampling.logprobs is not None:
                ids, values = self._top(int(token_ids[index]), sampling.logprobs)
                logprobs.append(SampledLogprobs(row, ids, values, 1))
        return logprobs, failed

    def _end_or_not(self, token_id: int, num_output: int, sampling: SamplingParams) -> int:
        ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        if 0 < self.settings.eos_after <= num_output and num_output >= sampling.min_tokens and sampling.eos_token_ids:
            return sampling.eos_token_ids[0]
        while token_id in ends:
            token_id = (token_id + 1) % self.settings.vocab_size
        return token_id

    def _prompt_logprobs(self, row: int, count: int) -> PromptLogprobs | None:
        """Logprobs of the prompt tokens that follow the `count` positions computed now."""
        wanted = self.sampling[row].prompt_logprobs
        prompt = self.prompts[row]
        first = int(self.num_computed[row]) + 1
        last = min(first + count, prompt.size)
        if wanted is None or first >= last:
            return None
        ids, values = zip(*(self._top(int(token), wanted) for token in prompt[first:last]), strict=True)
        return PromptLogprobs(row, first, np.concatenate(ids), np.concatenate(values), np.ones(last - first, np.int32))

    def _top(self, token_id: int, k: int) -> tuple[Int32Array, NDArray[np.float32]]:
        """([1 + k] ids, [1 + k] logprobs): the token is the likeliest, each id above it half as likely as the one before."""
        vocab_size = self.settings.vocab_size
        ranks = np.arange(vocab_size if k == -1 else min(k, vocab_size))
        ids = np.concatenate(([token_id], (token_id + ranks) % vocab_size)).astype(np.int32)
        values = -np.log(2.0) * np.concatenate(([1], 1 + ranks))
        return ids, values.astype(np.float32)


def _expect(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"the step breaks the contract of rows: {otherwise}")
