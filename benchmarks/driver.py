"""A model runner in this process, driven step by step: prompts and decodes on the clock."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from gpu.checkpoint.weights import Checkpoint
from gpu.config import WorkerConfig
from gpu.distributed import TensorParallelGroup
from gpu.plan import NewRequest, SamplingParams, SchedulerOutput
from gpu.runner.input_batch import OVERRUN
from gpu.runner.runner import ModelRunner

NONE = np.zeros(0, np.int32)


class Driver:
    """Makes a runner's plans. Each of its rows has blocks for `max_len` tokens of its own; token ids are random."""

    def __init__(self, config: WorkerConfig, checkpoint: Checkpoint, device: torch.device, max_len: int) -> None:
        self.num_rows = config.max_num_seqs
        self.runner = ModelRunner(config, checkpoint, device, TensorParallelGroup())
        self.runner.load(lambda fraction: None)
        blocks = -(-(max_len + OVERRUN) // config.cache.block_size)
        self.runner.allocate_kv(1 + blocks * self.num_rows, max_len)
        self.blocks = 1 + np.arange(blocks * self.num_rows, dtype=np.int32).reshape(self.num_rows, -1)
        self.generator = np.random.default_rng(0)
        self.step = 0

    def new(self, row: int, length: int, computed: int = 0, sampling: SamplingParams | None = None) -> NewRequest:
        """A prompt of `length` tokens, the first `computed` of which have their KV; greedy by default."""
        tokens = self.generator.integers(0, self.runner.model.config.vocab_size, length).astype(np.int32)
        sampling = sampling or SamplingParams(temperature=0.0)
        return NewRequest(row, tokens, length, computed, self.blocks[row], sampling, sampling.seed)

    def execute(self, new: list[NewRequest], rows: Sequence[int], counts: list[int], freed: Sequence[int] = ()) -> float:
        """Seconds of a step that computes `counts[i]` tokens of `rows[i]`, the answer on the host included."""
        columns = (np.array(rows, np.int32), np.array(counts, np.int32))
        plan = SchedulerOutput(self.step, list(freed), new, NONE, NONE, *columns, sum(counts))
        self.step += 1
        started = time.perf_counter()
        output = self.runner.execute(plan)
        seconds = time.perf_counter() - started
        self.runner.rest()
        if output.failed_rows:
            raise AssertionError(f"rows failed: {output.failed_rows}")
        return seconds

    def fill_kv(self) -> None:
        """With some number: the values of KV do not change what a step costs, as long as they are finite."""
        for layer in self.runner.kv.layers:
            for cache in layer:
                cache.fill_(0.5)

    def start_decodes(self, num_rows: int, context: int) -> None:
        """Let rows 0..num_rows-1 decode after `context` tokens, whose KV is whatever lies in memory."""
        self.execute([self.new(row, context, context - 1) for row in range(num_rows)], range(num_rows), [1] * num_rows)

    def decode(self, num_rows: int) -> float:
        """Seconds of a token more for each of the decodes that `start_decodes` started."""
        return self.execute([], range(num_rows), [1] * num_rows)

    def prefill(self, length: int) -> float:
        """Seconds of a prompt's only step, in row 0, which is free before and after."""
        seconds = self.execute([self.new(0, length)], [0], [length])
        self.free()
        return seconds

    def free(self) -> None:
        """Free all rows."""
        self.execute([], [], [], range(self.num_rows))
