"""When a sampled token ends its request."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.protocol import FinishReason
from engine.scheduling.request import Request
from gpu.plan import Int32Array

LARGEST_VOCABULARY = 1 << 22  # an id beyond is never sampled; the largest vocabularies have a sixteenth of it


class StopTokens:
    """How many live requests a token may end, by token id: one gather tells which rows of a step deserve a closer look."""

    def __init__(self) -> None:
        self._counts: NDArray[np.int32] = np.zeros(1, dtype=np.int32)  # the last entry stands for all ids beyond and stays 0

    def add(self, request: Request) -> None:
        ids = self._ids(request)
        if ids.size and ids.max() >= len(self._counts) - 1:
            grown = np.zeros(max(int(ids.max()) + 2, 2 * len(self._counts)), dtype=np.int32)
            grown[: len(self._counts)] = self._counts
            self._counts = grown
        np.add.at(self._counts, ids, 1)

    def remove(self, request: Request) -> None:
        np.subtract.at(self._counts, self._ids(request), 1)

    def candidates(self, token_ids: Int32Array) -> NDArray[np.bool_]:
        """[num_tokens] whether some live request ends at this token."""
        return self._counts.take(token_ids, mode="clip") > 0

    @staticmethod
    def _ids(request: Request) -> NDArray[Any]:
        sampling = request.sampling
        eos = [] if sampling.ignore_eos else sampling.eos_token_ids
        ids = (*eos, *sampling.stop_token_ids)
        return np.array([token for token in ids if 0 <= token < LARGEST_VOCABULARY], dtype=np.intp)


def stop_after(
    request: Request, token_id: int, num_output_tokens: int, num_tokens: int, max_tokens: int
) -> tuple[FinishReason, int | str | None] | None:
    """Whether a request ends with the token it just got, and its stop reason: None for EOS, the id for the client's stop tokens.

    EOS comes before stop ids, both before an ordered stop and the caps; `min_tokens` holds back the first two only. `num_tokens`
    counts prompt and output, `max_tokens` is what they may reach.
    """
    sampling = request.sampling
    if num_output_tokens >= sampling.min_tokens:
        if not sampling.ignore_eos and token_id in sampling.eos_token_ids:
            return FinishReason.STOP, None
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP, token_id
    if request.ordered_stop is not None and num_output_tokens >= request.ordered_stop[0]:
        return FinishReason.STOP, request.ordered_stop[1]
    if num_tokens >= max_tokens:
        return FinishReason.LENGTH, None
    return None
