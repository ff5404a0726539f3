"""How prompts share a step: the shortest gets its part first, and the longest are not starved.

The first that runs, or else waits, in the policy's order has half of what the step can give to prompts, so that each is computed in
time whatever comes behind it. It holds KV blocks that others may wait for. The rest goes to those with the fewest tokens left, so
that a short prompt does not wait for long ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.scheduling.step_draft import Room

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


def share(parts: Sequence[PromptPart], room: Room, least: int) -> bool:
    """Fill in `tokens`; `parts` are running prompts in the policy's order, then waiting ones. False: all have what they want, and
    waiting ones are not taken off `room`.

    The first one gets `least` tokens even where no time is left, because decodes alone must not stop all prompts.
    """
    if _all_fit(parts, room):
        return False
    first = parts[0]
    _give(first, room, 0.5)
    for part in sorted(parts, key=lambda part: (part.rank, part.left - part.tokens)):
        _give(part, room)
        if part.tokens < part.wanted:  # what is left is less than one of its tokens: none passes it by with that
            break
    if not any(part.tokens for part in parts):
        first.tokens = max(0, min(first.wanted, least, room.tokens))
        room.take(first.tokens, first.context)
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
