"""Measures a loaded model by steps whose results are not used: the memory that they leave for KV, the time of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch

from gpu.config import WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.file_lock import one_at_a_time
from gpu.machine import available_memory, passing_memory
from gpu.models.attention import AttentionMetadata
from gpu.models.decoder import CausalLM
from gpu.models.kv_cache import KVCache
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import Batch
from gpu.runner.sampler import Sampler
from gpu.runner.step_profile import KeptProfile, StepProfile
from kernels import CACHE_DIRECTORY

MOST_CPU_KV_BYTES = 4 << 30
PROMPT_LEN = 512  # tokens of each prompt in a measured step
SHORT_LEN = 64  # tokens that are measured behind a long context
WARM_LEN = 2  # tokens of a step where it is known what the largest one takes
LONG_CONTEXT = 4096  # tokens, or as many as the model takes: what a prompt's end is measured behind

_EVERY_FILTER = SamplingParams(
    temperature=0.5,
    top_p=0.9,
    top_k=50,
    min_p=0.01,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logprobs=1,
)


class MakeKV(Protocol):
    def __call__(self, num_blocks: int, shared: bool = False) -> KVCache: ...


class Profiler:
    def __init__(
        self,
        config: WorkerConfig,
        model: CausalLM,
        sampler: Sampler,
        make_kv: MakeKV,
        make_batch: Callable[[int], Batch],
        group: TensorParallelGroup,
        device: torch.device,
        kept: KeptProfile | None = None,
    ) -> None:
        """`make_batch` takes the longest request's tokens; `kept` knows, or learns, what a CPU's steps take."""
        self.config = config
        self.device = device
        self._model = model
        self._sampler = sampler
        self._make_kv = make_kv
        self._make_batch = make_batch
        self._group = group
        self._kept = kept or KeptProfile(None)
        self._seconds_per_token = 0.0  # of the prompts in the last step; on a GPU without the time that they then take
        self._prompt_len = 0  # of the prompts in that step

    def kv_bytes_on_gpu(self) -> int:
        """Bytes that the largest step leaves for this rank's KV."""
        torch.cuda.reset_peak_memory_stats(self.device)
        self._largest_step()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(self.config.cache.gpu_memory_utilization * total) - peak)

    def kv_bytes_on_cpu(self, step_bytes: int) -> int:
        """This rank's share of what the largest steps leave: ranks and replicas live in the same memory."""
        workers = self._group.size * max(1, self.config.parallel.data_parallel_size)  # which all have steps
        share = self.config.cache.gpu_memory_utilization * (available_memory() - workers * step_bytes)
        return max(0, int(min(share, MOST_CPU_KV_BYTES)) // workers)

    def profile_on_cpu(self) -> StepProfile:
        """What steps take. What is compiled at first use is compiled then, also where the profile is known."""
        known = self._known()
        if known is None:
            with self._alone():
                known = self._known()
                if known is None:
                    return self._measure()
        self._warm_step()
        return known

    def _known(self) -> StepProfile | None:
        """The profile that an earlier start has kept; None where a rank has none, because all compute the same steps."""
        known = self._kept.read()
        return known if self._group.all_say(known is not None) else None

    def _alone(self) -> AbstractContextManager[None]:
        """Of engines that start together for the first time one compiles and measures, while the others wait for what it finds."""
        if self._group.size > 1:  # a rank needs the others in its steps
            return nullcontext()
        return one_at_a_time(CACHE_DIRECTORY / "lock", "another engine compiles and measures")

    def _measure(self) -> StepProfile:
        self._largest_step()  # maps the weights and compiles, which is not what a step needs
        memory = passing_memory(self._largest_step)
        found = StepProfile(memory, *self._prompt_cost())
        self._kept.write(found)
        return found

    def _prompt_cost(self) -> tuple[float, float]:
        """After the largest step: seconds of a token of a prompt, and how many more for each token that it attends to."""
        near = self._prompt_len / 2  # tokens that one of the last step attended to, on average
        context = min(LONG_CONTEXT, self._model.config.max_position_embeddings) - SHORT_LEN
        far = context + SHORT_LEN / 2
        if far < 2 * near:  # too short a context to make a difference
            return self._seconds_per_token, 0.0
        per_context = max(0.0, self._seconds_behind(context) / SHORT_LEN - self._seconds_per_token) / (far - near)
        return max(self._seconds_per_token - per_context * near, self._seconds_per_token / 10), per_context

    def _seconds_behind(self, context: int) -> float:
        """Of SHORT_LEN tokens of one prompt behind `context` others."""
        started = time.perf_counter()
        self._forward(np.array([0, SHORT_LEN], np.int32), context + np.arange(SHORT_LEN), context + SHORT_LEN)
        return time.perf_counter() - started

    def _largest_step(self) -> None:
        """The whole token budget in prompts of PROMPT_LEN tokens, then logits and sampling of the most rows a step may have."""
        self._step(self.config.max_num_batched_tokens, self.config.max_num_seqs)

    def _warm_step(self) -> None:
        """Runs all code that a step may run, one greedy row and one that is filtered among it."""
        self._step(min(WARM_LEN, self.config.max_num_batched_tokens), min(2, self.config.max_num_seqs))

    def _step(self, budget: int, num_rows: int) -> None:
        started = time.perf_counter()
        hidden = self._prompt_step(budget)
        self._seconds_per_token = (time.perf_counter() - started) / budget
        self._prompt_len = min(budget, PROMPT_LEN)
        rows = np.arange(num_rows, dtype=np.int32)
        batch = self._make_batch(min(budget, PROMPT_LEN))
        for row in rows.tolist():
            batch.apply(_new_request_plan(row, _EVERY_FILTER if row else SamplingParams(temperature=0.0)))
        logits = self._model.logits(hidden[torch.from_numpy(rows % budget)])
        self._sampler(logits, rows, batch.sampling, batch.histories)

    def _prompt_step(self, budget: int) -> torch.Tensor:
        """Hidden states of `budget` tokens, [budget, hidden], in prompts of at most PROMPT_LEN that overwrite each other's KV."""
        length = min(budget, PROMPT_LEN, self._model.config.max_position_embeddings)
        num_requests = -(-budget // length)
        query_start = np.minimum(np.arange(num_requests + 1, dtype=np.int32) * length, budget)
        return self._forward(query_start, np.arange(budget) % length, length)

    def _forward(self, query_start: np.ndarray, positions: np.ndarray, longest: int) -> torch.Tensor:
        """Hidden states of tokens at `positions`, of requests that begin at `query_start` and have at most `longest` tokens."""
        model, block_size = self._model, self.config.cache.block_size
        num_blocks = -(-longest // block_size)
        kv = self._make_kv(1 + num_blocks, shared=True)
        model.rotary.ensure(longest)
        step = AttentionMetadata(
            block_tables=self._send(1 + np.arange(num_blocks, dtype=np.int32)[np.newaxis]),
            rows=self._send(np.zeros(len(query_start) - 1, np.int32)),
            query_start=self._send(query_start),
            context_lens=self._send(positions[query_start[1:] - 1].astype(np.int32) + 1),
            slots=self._send(block_size + positions),
        )
        return model.forward(self._send(positions % model.config.vocab_size), self._send(positions), kv, step)

    def _send(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.device)


def _new_request_plan(row: int, sampling: SamplingParams) -> SchedulerOutput:
    none = np.zeros(0, np.int32)
    request = NewRequest(row, np.zeros(2, np.int32), 1, 0, none, sampling, 0)
    return SchedulerOutput(0, [], [request], none, none, none, none, 0)
