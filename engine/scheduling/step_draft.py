"""A step while it is planned."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from engine.scheduling.request import Request
from engine.scheduling.row_table import Counts, Rows
from engine.scheduling.step_cost import NO_COST, StepCost
from gpu.plan import NewRequest, SchedulerOutput


@dataclass
class Room:
    """What is left of a step."""

    tokens: int
    most_seconds: float  # that the step may take, by its cost
    cost: StepCost
    seconds: float = 0.0  # taken of them

    def fitting(self, num_tokens: int, context: int, share: float = 1.0) -> int:
        """How many of `num_tokens` tokens behind `context` others fit into a share of it."""
        most = min(num_tokens, int(self.tokens * share))
        return max(0, int(min(most, self.cost.tokens_within((self.most_seconds - self.seconds) * share, context))))

    def take(self, num_tokens: int, context: int) -> None:
        self.tokens -= num_tokens
        self.seconds += self.cost.seconds(num_tokens, context)

    def take_all(self, num_tokens: Counts, contexts: Counts) -> None:
        """Of many requests at once."""
        self.tokens -= int(num_tokens.sum())
        if self.cost is not NO_COST:
            per_token = self.cost.per_token + self.cost.per_context * (contexts + num_tokens / 2)
            self.seconds += float((num_tokens * per_token).sum())


@dataclass(slots=True)
class PlannedStep:
    """A step that is out: what must be taken in when it returns."""

    step: int
    rows: Rows
    num_tokens: Counts
    sampling_rows: Rows
    seconds: float  # by its cost


@dataclass(slots=True)
class StepDraft:
    step: int
    now: float  # epoch seconds
    room: Room
    spare: Room  # what no prompt has been promised
    parts: dict[Request, int] = field(default_factory=dict)  # tokens promised to waiting prompts, in the policy's order
    new_requests: list[NewRequest] = field(default_factory=list)
    new_rows: list[int] = field(default_factory=list)
    new_num_tokens: list[int] = field(default_factory=list)
    grown_rows: list[int] = field(default_factory=list)
    grown_blocks: list[int] = field(default_factory=list)
    num_preempted: int = 0

    def part_of(self, request: Request, num_computed: int, wanted: int) -> int:
        """How many of `wanted` tokens a waiting prompt may compute: what it was promised, else what no other was."""
        promised = self.parts.pop(request, None)
        if promised is not None:
            return min(wanted, promised)
        tokens = self.spare.fitting(wanted, num_computed)
        self.spare.take(tokens, num_computed)
        return tokens

    def admit(self, request: Request, num_computed: int, num_tokens: int) -> None:
        """A request that got its row and blocks computes `num_tokens` from position `num_computed` on."""
        self.new_rows.append(request.row)
        self.new_num_tokens.append(num_tokens)
        self.room.take(num_tokens, num_computed)
        self.new_requests.append(
            NewRequest(
                row=request.row,
                token_ids=request.token_ids,
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_computed,
                block_ids=np.array(request.block_ids, dtype=np.int32),
                sampling=request.sampling,
                seed=request.seed,
            )
        )

    def grow(self, rows: list[int], blocks: list[int]) -> None:
        """Rows that the workers hold get a block each; a row that stands there more often gets more."""
        self.grown_rows += rows
        self.grown_blocks += blocks

    def plan(self, rows: Rows, num_tokens: Counts, total: int, freed_rows: list[int]) -> SchedulerOutput:
        return SchedulerOutput(
            step=self.step,
            freed_rows=freed_rows,
            new_requests=self.new_requests,
            grown_rows=np.array(self.grown_rows, dtype=np.int32),
            grown_blocks=np.array(self.grown_blocks, dtype=np.int32),
            rows=rows.astype(np.int32),
            num_scheduled_tokens=num_tokens.astype(np.int32),
            total_num_scheduled_tokens=total,
        )
