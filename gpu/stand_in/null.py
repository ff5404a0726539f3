"""A model runner without a model: tokens depend on seed and position alone. Torch-free.

Chosen by `load_format="null"`, for tests of everything around the model and for measuring what headrace itself costs.
"""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np
from numpy.typing import NDArray

from gpu.config import Capacity, WorkerConfig
from gpu.plan import INVALID_REQUEST, Int32Array, NewRequest, SamplingParams
from gpu.stand_in.runner import StandInRunner, StandInSettings


def null_tokens(seeds: NDArray[np.uint64], positions: NDArray[np.uint64], lowest: int, vocab_size: int) -> Int32Array:
    """Token ids in [lowest, vocab_size) by the finalizer of SplitMix64 over (seed, position); all arrays [num_rows]."""
    mixed = seeds * np.uint64(0xD1342543DE82EF95) + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    ids: Int32Array = (np.uint64(lowest) + mixed % np.uint64(vocab_size - lowest)).astype(np.int32)
    return ids


class NullRunner(StandInRunner):
    def __init__(self, config: WorkerConfig, rank: int = 0, settings: StandInSettings | None = None) -> None:
        super().__init__(config, rank, settings)
        self.lowest_token_id = min(self.settings.lowest_token_id, self.vocab_size - 1)
        self.may_end = np.zeros(config.max_num_seqs, np.bool_)  # rows for which the hash is not the whole answer

    def capacity(self) -> Capacity:
        settings = self.settings
        fingerprint = f"null-{settings.vocab_size}-{settings.lowest_token_id}-{settings.eos_after}"
        return self._capacity("null", settings.max_model_len, fingerprint)

    def compile_grammar(self, grammar: str) -> Future[str]:
        compiled: Future[str] = Future()
        compiled.set_result(f"{INVALID_REQUEST}the null model has no tokenizer that a grammar could be about")
        return compiled

    def _take(self, request: NewRequest) -> None:
        super()._take(request)
        ends = (*request.sampling.eos_token_ids, *request.sampling.stop_token_ids)
        self.may_end[request.row] = max(ends, default=-1) >= self.lowest_token_id or self.settings.eos_after > 0

    def _next_tokens(self, rows: Int32Array) -> Int32Array:
        token_ids = null_tokens(self.seeds[rows], self.num_tokens[rows].astype(np.uint64), self.lowest_token_id, self.vocab_size)
        for index in np.flatnonzero(self.may_end[rows]).tolist():
            row = int(rows[index])
            num_output = int(self.num_tokens[row] - self.num_prompt[row])
            token_ids[index] = self._end_or_not(int(token_ids[index]), num_output, self.sampling[row])
        return token_ids

    def _end_or_not(self, token_id: int, num_output: int, sampling: SamplingParams) -> int:
        ends = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        if 0 < self.settings.eos_after <= num_output and num_output >= sampling.min_tokens and sampling.eos_token_ids:
            return sampling.eos_token_ids[0]
        while token_id in ends:
            token_id = (token_id + 1) % self.vocab_size
        return token_id
