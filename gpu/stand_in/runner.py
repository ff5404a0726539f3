"""A runner that computes nothing: it keeps rows as the real one does, and a subclass says which tokens they get. Torch-free.

It checks each step against the contract of `gpu.plan` and raises ValueError for a plan that breaks it, so that a mistake of the
scheduler shows.
"""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, fields

import msgspec
import numpy as np
from numpy.typing import NDArray

from gpu.config import Capacity, WorkerConfig
from gpu.plan import (
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
class StandInSettings:
    """How such a runner behaves, read from `HEADRACE_NULL_RUNNER="name=value,..."`."""

    vocab_size: int = 49152  # of the null model
    lowest_token_id: int = 256  # of the null model: ids below it (special tokens in most vocabularies) are not sampled
    eos_after: int = 0  # of the null model: output tokens after which a request gets its end-of-sequence token; 0: never
    max_model_len: int = 8192  # of the null model
    kv_bytes: int = 1 << 30
    load_seconds: float = 0.0
    step_seconds: float = 0.0
    fail_while: str = ""  # "load" or "execute": raise there
    fail_rank: int = 0
    fail_step: int = 0  # the first step that raises
    hang_step: int = 0  # the first step that never returns; 0: none
    fail_seed: int = -1  # a request with this seed (>= 0) fails alone, by `failed_rows`, at its first output token

    @classmethod
    def from_environment(cls) -> StandInSettings:
        """Raises ValueError for a name that is not a setting, msgspec.ValidationError for a value that is not of its type."""
        items = [item.partition("=") for item in os.environ.get(ENVIRONMENT_VARIABLE, "").split(",") if item.strip()]
        values = {name.strip(): value.strip() for name, _, value in items}
        names = {field.name for field in fields(cls)}
        if unknown := values.keys() - names:
            raise ValueError(
                f"{ENVIRONMENT_VARIABLE} has no setting {', '.join(sorted(unknown))}; it has {', '.join(sorted(names))}"
            )
        return msgspec.convert(values, cls, strict=False)


class StandInRunner(ABC):
    """ModelRunner's interface; under tensor parallel each rank computes alone."""

    def __init__(self, config: WorkerConfig, rank: int = 0, settings: StandInSettings | None = None) -> None:
        self.config = config
        self.rank = rank
        self.settings = settings or StandInSettings.from_environment()
        self.vocab_size = self.settings.vocab_size
        rows = config.max_num_seqs
        self.num_tokens = np.zeros(rows, np.int64)  # 0: the row is free
        self.num_computed = np.zeros(rows, np.int64)
        self.num_prompt = np.zeros(rows, np.int64)
        self.num_blocks_held = np.zeros(rows, np.int64)
        self.seeds = np.zeros(rows, np.uint64)
        self.wants_logprobs = np.zeros(rows, np.bool_)
        self.sampling = [SamplingParams()] * rows
        self.prompts: dict[int, Int32Array] = {}  # of rows that want prompt logprobs
        self.failed: dict[int, str] = {}  # why, of rows that are to get no token
        self.num_blocks = 0
        self.max_model_len = 0

    @abstractmethod
    def capacity(self) -> Capacity: ...

    @abstractmethod
    def compile_grammar(self, grammar: str) -> Future[str]: ...

    @abstractmethod
    def _next_tokens(self, rows: Int32Array) -> Int32Array:
        """[num_rows] the tokens behind the known ones. They may depend on the row's request and known tokens alone."""

    def load(self, progress: Callable[[float], None]) -> None:
        parts = 4
        for part in range(parts):
            progress(part / parts)
            if self.settings.load_seconds:
                time.sleep(self.settings.load_seconds / parts)
            if part == 1 and self._fails_while("load"):
                raise RuntimeError(f"failure while loading, as {ENVIRONMENT_VARIABLE} orders")
        progress(1.0)

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
        sampled = plan.rows[self.num_computed[plan.rows] == self.num_tokens[plan.rows]]
        failed_rows = {row: self.failed[row] for row in sampled.tolist() if row in self.failed} if self.failed else {}
        rows = sampled[~np.isin(sampled, list(failed_rows))] if failed_rows else sampled
        token_ids = self._next_tokens(rows)
        self.num_tokens[sampled] += 1
        logprobs = [
            SampledLogprobs(int(rows[index]), *self._top(int(token_ids[index]), self.sampling[rows[index]].logprobs or 0), 1)
            for index in np.flatnonzero(self.wants_logprobs[rows]).tolist()
        ]
        return ModelRunnerOutput(plan.step, rows, token_ids, logprobs, prompt_logprobs, failed_rows, time.perf_counter() - started)

    def rest(self) -> None:
        """Nothing is kept from step to step."""
        return

    def _capacity(self, kind: str, max_model_len: int, fingerprint: str) -> Capacity:
        """`kind`: the model's, in place of a dtype."""
        return Capacity(
            max_model_len=max_model_len,
            vocab_size=self.vocab_size,
            dtype=kind,
            device="cpu",
            weight_bytes=0,
            block_bytes=self.config.cache.block_size * BYTES_PER_TOKEN,
            available_kv_bytes=self.config.cache.kv_cache_memory_bytes or self.settings.kv_bytes,
            fingerprint=fingerprint,
        )

    def _fails_while(self, phase: str) -> bool:
        return self.settings.fail_while == phase and self.settings.fail_rank == self.rank

    def _apply(self, plan: SchedulerOutput) -> None:
        """Free, take, grow, in this order; then what is to be computed must be known and have a block."""
        self.num_tokens[plan.freed_rows] = 0
        for row in plan.freed_rows:
            self.prompts.pop(row, None)
            self.failed.pop(row, None)
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
        self.wants_logprobs[row] = sampling.logprobs is not None
        if sampling.prompt_logprobs is not None:
            self.prompts[row] = request.token_ids[: request.num_prompt_tokens]
        if 0 <= self.settings.fail_seed == int(self.seeds[row]):
            self.failed[row] = f"seed {self.settings.fail_seed} fails, as {ENVIRONMENT_VARIABLE} orders"

    def _expect_blocks(self, block_ids: Int32Array) -> None:
        if block_ids.size:
            _expect(0 < block_ids.min() and block_ids.max() < self.num_blocks, "a block that does not exist, or the null block")

    def _rows_with_prompt_logprobs(self, plan: SchedulerOutput) -> list[tuple[int, int]]:
        """(row, scheduled tokens) each."""
        if not self.prompts:
            return []
        pairs = zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True)
        return [(row, count) for row, count in pairs if row in self.prompts]

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
        ranks = np.arange(self.vocab_size if k == -1 else min(k, self.vocab_size))
        ids = np.concatenate(([token_id], (token_id + ranks) % self.vocab_size)).astype(np.int32)
        values = -np.log(2.0) * np.concatenate(([1], 1 + ranks))
        return ids, values.astype(np.float32)


def _expect(holds: bool | np.bool_, otherwise: str) -> None:
    if not holds:
        raise ValueError(f"the step breaks the contract of rows: {otherwise}")
