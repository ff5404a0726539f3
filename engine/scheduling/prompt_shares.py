"""How prompts share a step: the shortest gets its part first, and the longest are not starved.

Half of what the step can give to prompts goes to the first prompt in the policy's order, of those that run or else of those that
wait. So each prompt is computed in time, and gives back KV blocks that others may wait for. The rest goes to those with the fewest
tokens left, so that a short prompt does not wait for long ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from engine.scheduling.kv_cache_manager import KVCacheManager
from engine.scheduling.request import Request
from engine.scheduling.row_table import Counts, Rows, RowTable
from engine.scheduling.step_draft import Room, StepDraft
from engine.scheduling.waiting_queue import WaitingQueue

MOST_PROMPTS = 8  # that are looked at for a share; those behind wait


@dataclass
class PromptPart:
    """A prompt that wants to be computed, and what it gets."""

    left: int  # tokens to compute
    context: int  # tokens computed before
    most: int  # tokens that it may get in one step
    rank: int = 0  # lower ones come before shorter ones
    waits: bool = False
    tokens: int = 0

    @property
    def wanted(self) -> int:
        return min(self.left, self.most)


class PromptShares:
    """Divides a step among running requests and the first that wait. Reads the scheduler's tables and keeps nothing."""

    def __init__(self, policy: str, rows: RowTable, waiting: WaitingQueue, kv: KVCacheManager) -> None:
        self._by_priority = policy == "priority"
        self._rows = rows
        self._waiting = waiting
        self._kv = kv

    def divide(self, draft: StepDraft, rows: Rows, wanted: Counts, computed: Counts, most: int) -> Counts:
        """Tokens of each running request: all that are `wanted` where they fit, with those of the first that wait; else decodes
        have theirs, and prompts share the rest. Those of waiting prompts are noted in the draft. No prompt gets over `most`."""
        room, is_prompt = draft.spare, wanted > 1
        num_tokens = np.where(is_prompt, 0, wanted)
        if int(num_tokens.sum()) >= room.tokens:  # decodes alone fill the step: all in order, so that no prompt starves
            num_tokens = clip(wanted, room.tokens)
            room.take_all(num_tokens, computed)
            return num_tokens
        room.take_all(num_tokens, computed)
        running = [
            self._part_of(self._rows.request(row), int(self._rows.num_tokens[row]), context, most)
            for row, context in zip(rows[is_prompt].tolist(), computed[is_prompt].tolist(), strict=True)
        ]
        first = self._next_admissible(MOST_PROMPTS - len(running))
        waiting = [self._part_of(request, request.num_tokens, self._num_cached(request), most, waits=True) for request in first]
        if share([*running, *waiting], room, self._kv.block_size):
            draft.parts = {request: part.tokens for request, part in zip(first, waiting, strict=True) if part.tokens}
        num_tokens[is_prompt] = [part.tokens for part in running]
        return num_tokens

    def _part_of(self, request: Request, num_tokens: int, context: int, most: int, waits: bool = False) -> PromptPart:
        rank = request.priority if self._by_priority else 0
        return PromptPart(num_tokens - context, context, most, rank, waits)

    def _next_admissible(self, count: int) -> list[Request]:
        """The first that wait, as far as there are rows for them and none waits for its own last step to return."""
        first = self._waiting.first(min(count, self._rows.num_free))
        return list(itertools.takewhile(lambda request: request.row < 0, first))

    def _num_cached(self, request: Request) -> int:
        return len(self._kv.find_hit(request).block_ids) * self._kv.block_size


def clip(num_tokens: Counts, budget: int) -> Counts:
    """The first of them, as far as the budget goes."""
    return np.clip(budget - (num_tokens.cumsum() - num_tokens), 0, num_tokens)


def share(parts: Sequence[PromptPart], room: Room, least: int) -> bool:
    """Fill in `tokens`; `parts` are running prompts in the policy's order, then waiting ones. False: all have what they want, and
    waiting ones are not taken off `room`.

    The first one gets `least` tokens even where no time is left, because decodes alone must not stop all prompts. Where others wait
    and it runs, it gets one token even where its half of the time is too short: they may lack the blocks that it holds.
    """
    if _all_fit(parts, room):
        return False
    first = parts[0]
    _give(first, room, 0.5)
    is_late = first.tokens == 0 and not first.waits and any(part.waits for part in parts)
    if is_late:
        first.tokens = min(1, room.tokens)
        room.tokens -= first.tokens
    for part in sorted(parts, key=lambda part: (part.rank, part.left - part.tokens)):
        _give(part, room)
        if part.tokens < part.wanted:  # what is left is less than one of its tokens: none passes it by with that
            break
    if sum(part.tokens for part in parts) <= is_late:
        more = max(0, min(min(first.wanted, least) - first.tokens, room.tokens))
        first.tokens += more
        room.take(more, first.context)
    return True


def _all_fit(parts: Sequence[PromptPart], room: Room) -> bool:
    trial = replace(room)
    for part in parts:
        if trial.fitting(part.wanted, part.context) < part.wanted:
            return False
        trial.take(part.wanted, part.context)
    for part in parts:
        part.tokens = part.wanted
        if not part.waits:
            room.take(part.tokens, part.context)
    return True


def _give(part: PromptPart, room: Room, share: float = 1.0) -> None:
    """What it still wants, as far as a share of the room goes."""
    context = part.context + part.tokens
    given = room.fitting(part.wanted - part.tokens, context, share)
    room.take(given, context)
    part.tokens += given
