"""A step in parts that threads compute side by side, each through the whole model, with one meeting at the end.

Threads inside matrix products meet at a barrier after each product, about two hundred times a step. They lose a time slice at each
barrier where another process runs on a core. Threads that take a part of the tokens each meet once.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
import torch

from gpu.models.attention import AttentionMetadata, Pace
from gpu.runner.input_batch import Step
from kernels.cpu.crew import Crew

T = TypeVar("T")

# Tokens a part has at least. Products of fewer rows take as long as their weights take to arrive. Parts that run side by side read
# them together, the second out of the cache that cores share: on two cores of an EPYC two parts take 0.52 of the time of one for a
# prompt of 128 tokens, 0.65 for 16 decodes with bfloat16, and as long as one for 8.
FEWEST_TOKENS = 8
# Where other engines compute on the same cores, one that takes them all for a short step meets one that begins its own meanwhile.
FEWEST_TOKENS_BESIDE_OTHERS = 32


@dataclass
class Part:
    """Adjacent tokens of a step; may begin and end within a request."""

    tokens: slice  # of the step's
    attention: AttentionMetadata
    last_tokens: torch.Tensor  # [num_sampled] int64: the tokens, counted from the part's first, whose logits are wanted


def count_parts(step: Step, num_threads: int, num_engines: int) -> int:
    """Into how many parts a step of one of `num_engines` is cut: one for each free thread, or one for all together."""
    fewest = FEWEST_TOKENS if num_engines == 1 else FEWEST_TOKENS_BESIDE_OTHERS
    return num_threads if int(step.query_start[-1]) >= num_threads * fewest else 1


def split(step: Step, num_parts: int, shares_kv: bool) -> list[Part]:
    """`num_parts` parts of about equal numbers of tokens; the step has as many.

    shares_kv: a request may read KV that another one, before it, writes in this step.
    """
    total = int(step.query_start[-1])
    last_tokens = step.last_tokens
    if num_parts == 1:
        return [Part(slice(0, total), step.attention, torch.from_numpy(last_tokens))]
    borders = [total * i // num_parts for i in range(num_parts + 1)]
    ordered = shares_kv or not np.isin(borders, step.query_start).all()
    parts: list[Part] = []
    for begin, end in pairwise(borders):
        attention = _cut(step, begin, end)
        if ordered:
            attention.pace = Pace()
            attention.ahead = parts[-1].attention.pace if parts else None
        wanted = last_tokens[np.searchsorted(last_tokens, begin) : np.searchsorted(last_tokens, end)] - begin
        parts.append(Part(slice(begin, end), attention, torch.from_numpy(wanted)))
    return parts


def _cut(step: Step, begin: int, end: int) -> AttentionMetadata:
    """The attention metadata of the step's tokens begin..end-1."""
    first = int(np.searchsorted(step.query_start, begin, side="right")) - 1
    stop = int(np.searchsorted(step.query_start, end, side="left"))
    whole = step.attention
    ends = step.query_start[first + 1 : stop + 1]
    return AttentionMetadata(
        block_tables=whole.block_tables,
        rows=whole.rows[first:stop],
        query_start=torch.from_numpy((step.query_start[first : stop + 1].clip(begin, end) - begin).astype(np.int32)),
        context_lens=whole.context_lens[first:stop] - torch.from_numpy((ends - ends.clip(max=end)).astype(np.int32)),
        slots=whole.slots[begin:end],
    )


class Team:
    """The calling thread and `size` - 1 more. They take a part of a step each, or all together a step in one piece.

    Together they share each product and attention (`kernels.cpu.crew`); torch's own operations use its own threads, where there are
    more than two.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._others = ThreadPoolExecutor(size - 1, "part", initializer=torch.set_num_threads, initargs=(1,)) if size > 1 else None
        self._crew = Crew(size)

    def map(self, work: Callable[[Part], T], parts: list[Part], num_threads: int) -> list[T]:
        """work(part) for each part, the last of them here. When one raises, the others are let go, and it is raised."""
        if self.size > 2:
            torch.set_num_threads(num_threads if len(parts) == 1 else 1)
        if len(parts) == 1:
            with self._crew.gather(num_threads):
                return [_guarded(work, parts[0])]
        assert self._others is not None
        others = [self._others.submit(_guarded, work, part) for part in parts[:-1]]
        try:
            last = _guarded(work, parts[-1])
        finally:
            results = [other.result() for other in others]
        return [*results, last]


@torch.inference_mode()
def _guarded(work: Callable[[Part], T], part: Part) -> T:
    try:
        return work(part)
    except BaseException:
        if part.attention.pace is not None:
            part.attention.pace.give_up()
        raise
