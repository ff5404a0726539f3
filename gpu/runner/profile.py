"""Measures a loaded model by steps whose results are not used: the memory that they leave for KV, the time of a prompt."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import numpy as np
import torch

from gpu.config import WorkerConfig
from gpu.machine import available_memory, passing_memory
from gpu.models.attention import AttentionMetadata
from gpu.models.decoder import CausalLM
from gpu.models.kv_cache import KVCache
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import Batch
from gpu.runner.sampler import Sampler
from gpu.runner.step_memory import StepMemory

MOST_CPU_KV_BYTES = 4 << 30
PROMPT_LEN = 512  # tokens of each prompt in a measured step
SHORT_LEN = 64  # tokens of a step where the largest one's memory is known

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
        num_ranks: int,
        device: torch.device,
        memory: StepMemory | None = None,
    ) -> None:
        """`make_batch` takes the longest request's tokens; `memory` knows, or learns, the memory of a CPU's largest step."""
        self.config = config
        self.device = device
        self._model = model
        self._sampler = sampler
        self._make_kv = make_kv
        self._make_batch = make_batch
        self._num_ranks = num_ranks
        self._memory = memory or StepMemory(None)
        self.seconds_per_token = 0.0  # of the prompts in the largest step; on a GPU without the time that they then take

    def available_kv_bytes(self) -> int:
        """This rank's share of what the largest step leaves; ranks and replicas live in the same memory of a CPU."""
        utilization = self.config.cache.gpu_memory_utilization
        if self.device.type == "cpu":
            activations = self._step_memory()
            workers = self._num_ranks * max(1, self.config.parallel.data_parallel_size)  # which all have steps
            share = utilization * (available_memory() - workers * activations)
            return max(0, int(min(share, MOST_CPU_KV_BYTES)) // workers)
        torch.cuda.reset_peak_memory_stats(self.device)
        self._largest_step()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(utilization * total) - peak)

    def _step_memory(self) -> int:
        """Bytes that the largest step has at its peak and gives back. What is compiled at first use is compiled then."""
        known = self._memory.read()
        step = self._largest_step if known is None else self._short_step
        step()  # maps the weights and compiles, which is not what a step needs
        if known is not None:
            step()
            return known
        found = passing_memory(step)
        self._memory.write(found)
        return found

    def _largest_step(self) -> None:
        """The whole token budget in prompts of PROMPT_LEN tokens, then logits and sampling of the most rows a step may have."""
        self._step(self.config.max_num_batched_tokens, self.config.max_num_seqs)

    def _short_step(self) -> None:
        """As much as tells how long a token takes."""
        self._step(min(SHORT_LEN, self.config.max_num_batched_tokens), min(2, self.config.max_num_seqs))

    def _step(self, budget: int, num_rows: int) -> None:
        started = time.perf_counter()
        hidden = self._prompt_step(budget)
        self.seconds_per_token = (time.perf_counter() - started) / budget
        rows = np.arange(num_rows, dtype=np.int32)
        batch = self._make_batch(min(budget, PROMPT_LEN))
        for row in rows.tolist():
            batch.apply(_new_request_plan(row, _EVERY_FILTER if row else SamplingParams(temperature=0.0)))
        logits = self._model.logits(hidden[torch.from_numpy(rows % budget)])
        self._sampler(logits, rows, batch.sampling, batch.histories)

    def _prompt_step(self, budget: int) -> torch.Tensor:
        """Hidden states of `budget` tokens, [budget, hidden], in prompts of at most PROMPT_LEN that overwrite each other's KV."""
        model, block_size = self._model, self.config.cache.block_size
        length = min(budget, PROMPT_LEN, model.config.max_position_embeddings)
        num_requests, num_blocks = -(-budget // length), -(-length // block_size)
        kv = self._make_kv(1 + num_blocks, shared=True)
        model.rotary.ensure(length)
        query_start = np.minimum(np.arange(num_requests + 1, dtype=np.int32) * length, budget)
        positions = np.arange(budget) % length
        step = AttentionMetadata(
            block_tables=self._send(1 + np.arange(num_blocks, dtype=np.int32)[np.newaxis]),
            rows=self._send(np.zeros(num_requests, np.int32)),
            query_start=self._send(query_start),
            context_lens=self._send(np.diff(query_start)),
            slots=self._send(block_size + positions),
        )
        return model.forward(self._send(positions % model.config.vocab_size), self._send(positions), kv, step)

    def _send(self, x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(x).to(self.device)


def _new_request_plan(row: int, sampling: SamplingParams) -> SchedulerOutput:
    none = np.zeros(0, np.int32)
    request = NewRequest(row, np.zeros(2, np.int32), 1, 0, none, sampling, 0)
    return SchedulerOutput(0, [], [request], none, none, none, none, 0)
