"""A worker in memory that believes nothing: it keeps the row contract's tables by itself and the content of every KV slot.

The content of a slot is the digest of all tokens up to its position (and of the cache salt, which must not mix). A step writes
the slots of all its rows, then every row reads its whole context: what attention would read must be what that row's own tokens
would have written. The next token is a pure function of context and seed, so that what a request must answer is known beforehand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from engine.protocol import FinishReason
from gpu.plan import ModelRunnerOutput, NewRequest, PromptLogprobs, SampledLogprobs, SamplingParams, SchedulerOutput

VOCAB_SIZE = 12
WRONG_TOKEN = 99  # what a row samples after reading the KV of a failed one
SPOILED = -1  # content of a slot that a failed row wrote


_MASK = (1 << 64) - 1


def _extend(digest: int, token: int) -> int:
    return (digest * 0x5851F42D4C957F2D + token + 1) & _MASK


def _next_token(digest: int, seed: int, sampling: SamplingParams, num_outputs: int) -> int:
    token = ((digest ^ seed * 0x9E3779B97F4A7C15) * 0xD1342543DE82EF95 & _MASK) % (VOCAB_SIZE * 65521) // 65521
    stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
    while num_outputs + 1 < sampling.min_tokens and token in stops:
        token = (token + 1) % (VOCAB_SIZE + 4)
    return token


def salt_digest(salt: str) -> int:
    return crc32(salt.encode())


def expected_answer(
    prompt: list[int], sampling: SamplingParams, seed: int, salt: str, max_model_len: int
) -> tuple[list[int], FinishReason, int | None]:
    """What a request answers when nothing disturbs it, with its reason and stop reason."""
    digest, answer = salt_digest(salt), []
    for token in prompt:
        digest = _extend(digest, token)
    while True:
        token = _next_token(digest, seed, sampling, len(answer))
        answer.append(token)
        digest = _extend(digest, token)
        if len(answer) >= sampling.min_tokens:
            if token in sampling.eos_token_ids and not sampling.ignore_eos:
                return answer, FinishReason.STOP, None
            if token in sampling.stop_token_ids:
                return answer, FinishReason.STOP, token
        if len(answer) == sampling.max_tokens or len(prompt) + len(answer) == max_model_len:
            return answer, FinishReason.LENGTH, None


@dataclass
class Row:
    tokens: list[int]
    num_prompt: int
    num_computed: int
    blocks: list[int]
    sampling: SamplingParams
    seed: int
    digests: list[int] = field(default_factory=list)  # of the tokens up to each position
    spoiled: bool = False  # something it computed came from a failed row's KV
    failed: bool = False  # samples nothing any more


class WorkerOracle:
    def __init__(
        self,
        *,
        num_rows: int,
        budget: int,
        block_size: int,
        num_blocks: int,
        salt_of: Callable[[NewRequest], str] = lambda new: "",
    ) -> None:
        self.num_rows, self.budget, self.block_size, self.num_blocks = num_rows, budget, block_size, num_blocks
        self.salt_of = salt_of
        self.rows: dict[int, Row] = {}
        self.slots: dict[tuple[int, int], int] = {}  # (block, offset) -> digest
        self.failing: set[int] = set()  # rows that fail in the next step that computes them
        self.last_step = 0
        self.num_computed_tokens = 0
        self.num_computed_prompt_tokens = 0

    def execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        assert plan.step > self.last_step
        self.last_step = plan.step
        self._apply(plan)
        rows = dict(zip(plan.rows.tolist(), plan.num_scheduled_tokens.tolist(), strict=True))
        assert len(rows) == len(plan.rows) <= self.num_rows, "a row is scheduled twice"
        assert all(count >= 1 for count in rows.values())
        assert sum(rows.values()) == plan.total_num_scheduled_tokens <= self.budget
        assert {new.row for new in plan.new_requests} <= rows.keys(), "a request is sent and not computed"
        for row, count in rows.items():
            self._write(row, count)
        for number in self.failing & rows.keys():
            self.rows[number].failed = True
        self.failing -= rows.keys()
        for row, count in rows.items():
            if self.rows[row].failed or not self._read(row, count):
                self._spoil(row, count)
        return self._answer(plan.step, rows)

    def _apply(self, plan: SchedulerOutput) -> None:
        for row in plan.freed_rows:
            del self.rows[row]
        for new in plan.new_requests:
            assert 0 <= new.row < self.num_rows and new.row not in self.rows, "a row is given twice"
            assert 0 <= new.num_computed_tokens < len(new.token_ids), "nothing is left to compute"
            assert new.num_computed_tokens % self.block_size == 0
            assert 0 < new.num_prompt_tokens <= len(new.token_ids)
            row = Row(new.token_ids.tolist(), new.num_prompt_tokens, new.num_computed_tokens, [], new.sampling, new.seed)
            digest = salt_digest(self.salt_of(new))
            for token in row.tokens:
                digest = _extend(digest, token)
                row.digests.append(digest)
            self.rows[new.row] = row
            self._grow(row, new.block_ids.tolist())
        for number, block in zip(plan.grown_rows.tolist(), plan.grown_blocks.tolist(), strict=True):
            self._grow(self.rows[number], [block])

    def _grow(self, row: Row, blocks: list[int]) -> None:
        for block in blocks:
            assert 0 < block < self.num_blocks and block not in row.blocks
            row.blocks.append(block)

    def _slot(self, row: Row, position: int) -> tuple[int, int]:
        return row.blocks[position // self.block_size], position % self.block_size

    def _write(self, number: int, count: int) -> None:
        row = self.rows[number]
        end = row.num_computed + count
        assert end <= len(row.tokens), "tokens are computed that nobody knows"
        assert len(row.blocks) == -(-end // self.block_size), "blocks do not fit the tokens"
        for position in range(row.num_computed, end):
            block, offset = self._slot(row, position)
            for other in self.rows.values():
                if other is not row and block in other.blocks:
                    theirs = other.blocks.index(block) * self.block_size + offset
                    assert other.digests[theirs] == row.digests[position], f"a slot of block {block} is written under another row"
            self.slots[block, offset] = row.digests[position]
        self.num_computed_tokens += count
        self.num_computed_prompt_tokens += max(0, min(end, row.num_prompt) - row.num_computed)

    def _read(self, number: int, count: int) -> bool:
        """Whether all that the row reads is its own past; False where it shares what a failed row wrote."""
        row = self.rows[number]
        found = [self.slots.get(self._slot(row, position)) for position in range(row.num_computed + count)]
        if SPOILED in found:
            return False
        assert found == row.digests[: len(found)], f"row {number} reads something foreign"
        return True

    def _spoil(self, number: int, count: int) -> None:
        """What was computed from wrong values is wrong, the next token included."""
        row = self.rows[number]
        row.spoiled = True
        for position in range(row.num_computed, row.num_computed + count):
            self.slots[self._slot(row, position)] = SPOILED

    def _answer(self, step: int, rows: dict[int, int]) -> ModelRunnerOutput:
        output = ModelRunnerOutput(step, np.empty(0, np.int32), np.empty(0, np.int32), [], [], {}, 0.0)
        sampled: list[int] = []
        tokens: list[int] = []
        for number, count in rows.items():
            row = self.rows[number]
            first = row.num_computed
            row.num_computed += count
            if row.failed:
                output.failed_rows[number] = "logits are not finite"
                if row.num_computed == len(row.tokens):  # a step planned ahead goes on from a token that means nothing
                    row.tokens.append(0)
                    row.digests.append(_extend(row.digests[-1], 0))
                continue
            if row.sampling.prompt_logprobs is not None:
                self._tell_prompt_logprobs(output, number, first)
            if row.num_computed == len(row.tokens):
                token = _next_token(row.digests[-1], row.seed, row.sampling, len(row.tokens) - row.num_prompt)
                if row.spoiled:
                    token = WRONG_TOKEN
                row.tokens.append(token)
                row.digests.append(_extend(row.digests[-1], token))
                sampled.append(number)
                tokens.append(token)
                if row.sampling.logprobs is not None:
                    ids = np.array([token], np.int32)
                    output.logprobs.append(SampledLogprobs(number, ids, np.zeros(1, np.float32), 1))
        output.rows, output.token_ids = np.array(sampled, np.int32), np.array(tokens, np.int32)
        return output

    def _tell_prompt_logprobs(self, output: ModelRunnerOutput, number: int, first: int) -> None:
        row = self.rows[number]
        told = row.tokens[first + 1 : min(row.num_computed + 1, row.num_prompt)]
        if told:
            ids = np.array(told, np.int32)
            ones = np.ones(len(told), np.int32)
            output.prompt_logprobs.append(PromptLogprobs(number, first + 1, ids, np.zeros(len(told), np.float32), ones))
