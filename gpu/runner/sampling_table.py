"""Sampling parameters of requests: one row each in columns, changed when a request comes or goes."""

from __future__ import annotations

import numpy as np

from gpu.plan import SamplingParams
from gpu.runner.thinking import ThinkingBudgets
from gpu.runner.token_rules import TokenRules

REPETITION_RANGE = (1e-30, 1e30)  # well inside float32's 1e+-38, so that logits stay finite


class SamplingTable:
    """Sampling parameters by row, as columns."""

    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.temperature = np.ones(max_num_seqs, np.float32)  # 1 for greedy rows
        self.greedy = np.ones(max_num_seqs, np.bool_)
        self.top_p = np.ones(max_num_seqs, np.float32)
        self.top_k = np.zeros(max_num_seqs, np.int32)
        self.min_p = np.zeros(max_num_seqs, np.float32)
        self.presence = np.zeros(max_num_seqs, np.float32)
        self.frequency = np.zeros(max_num_seqs, np.float32)
        self.repetition = np.ones(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.penalized = np.zeros(max_num_seqs, np.bool_)
        self.num_logprobs = np.full(max_num_seqs, -1, np.int32)  # -1: none wanted
        self.num_prompt_logprobs = np.full(max_num_seqs, -1, np.int32)
        self.rules = TokenRules(max_num_seqs, vocab_size)
        self.thinking = ThinkingBudgets(vocab_size)

    def set(self, row: int, sampling: SamplingParams, seed: int) -> str | None:
        """Fills a row. Returns why it cannot be sampled when its parameters name tokens that the model does not have."""
        greedy = sampling.greedy
        self.greedy[row] = greedy
        self.temperature[row] = 1.0 if greedy else sampling.temperature
        self.top_p[row] = 1.0 if greedy else sampling.top_p
        self.top_k[row] = 0 if greedy else max(0, sampling.top_k)
        self.min_p[row] = 0.0 if greedy else sampling.min_p
        self.presence[row] = sampling.presence_penalty
        self.frequency[row] = sampling.frequency_penalty
        self.repetition[row] = min(max(sampling.repetition_penalty, REPETITION_RANGE[0]), REPETITION_RANGE[1])
        self.penalized[row] = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0 or sampling.repetition_penalty != 1
        self.seeds[row] = (seed + 2**63) % 2**64 - 2**63  # modulo 2**64 into int64
        self.num_logprobs[row] = self._count(sampling.logprobs)
        self.num_prompt_logprobs[row] = self._count(sampling.prompt_logprobs)
        self.rules.clear(row)
        return self.rules.set(row, sampling) or self.thinking.set(row, sampling.thinking)

    def clear(self, row: int) -> None:
        self.rules.clear(row)
        self.thinking.clear(row)

    def _count(self, wanted: int | None) -> int:
        if wanted is None:
            return -1
        return self.vocab_size if wanted < 0 else min(wanted, self.vocab_size)
