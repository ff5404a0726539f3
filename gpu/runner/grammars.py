"""Rows whose output must match a grammar: where each stands in it, and the masks of the tokens that may come next.

A row's state follows from its output alone, so preemption and failover need nothing of it. Masks are filled on a thread, without
the GIL, while the step's forward pass runs: the plan of the next step needs none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from gpu.plan import Int32Array
from gpu.runner.compiled_grammars import CompiledGrammars, reason
from gpu.runner.token_rules import Histories


@dataclass
class TokenMasks:
    """Of a step's sampling rows that have a grammar."""

    places: np.ndarray  # [n] int64 among the sampling rows
    masks: Int32Array  # [n, ceil(vocab / 32)]: bit t % 32 of word t // 32 is 1 where token t may come next
    failed: dict[int, str] = field(default_factory=dict)  # place -> why no token can be chosen


@dataclass
class _Row:
    grammar: str
    matcher: LLMatcher | None = None  # None: not compiled yet
    num_consumed: int = 0  # output tokens


class Grammars:
    def __init__(self, vocab_size: int, make_tokenizer: Callable[[], LLTokenizer]) -> None:
        self._num_words = -(-vocab_size // 32)
        self._compiled = CompiledGrammars(make_tokenizer)
        self._rows: dict[int, _Row] = {}
        self._filling = ThreadPoolExecutor(1, "grammar-masks")

    @property
    def num_rows(self) -> int:
        """Rows that have a grammar."""
        return len(self._rows)

    @property
    def num_compiled(self) -> int:
        return len(self._compiled)

    def compile(self, grammar: str) -> Future[str]:
        """So that a step finds it compiled. The result is why it cannot be compiled, or ""."""
        return self._compiled.compile(grammar)

    def set(self, row: int, grammar: str) -> None:
        """`grammar` as in SamplingParams."""
        self._rows[row] = _Row(grammar)

    def clear(self, row: int) -> None:
        self._rows.pop(row, None)

    def fill(self, rows: Int32Array, histories: Histories) -> Future[TokenMasks] | None:
        """The masks of a step's sampling rows; None where no row has a grammar. The histories must not change meanwhile."""
        if not self._rows:
            return None
        places = np.array([place for place, row in enumerate(rows.tolist()) if row in self._rows], np.int64)
        return self._filling.submit(self._fill, places, rows, histories) if len(places) else None

    def _fill(self, places: np.ndarray, rows: Int32Array, histories: Histories) -> TokenMasks:
        filled = TokenMasks(places, np.empty((len(places), self._num_words), np.int32))
        for place, mask in zip(places.tolist(), filled.masks, strict=True):
            row = int(rows[place])
            begin, end = int(histories.num_prompt_tokens[row]), int(histories.num_tokens[row])
            try:
                matcher = self._matcher_behind(self._rows[row], histories.token_ids[row, begin:end])
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                why = reason(matcher.get_error())
            except Exception as error:  # of this row alone
                why = reason(f"{type(error).__name__}: {error}")
            if why:
                filled.failed[place] = why
                mask.fill(-1)
        return filled

    def _matcher_behind(self, row: _Row, output: Int32Array) -> LLMatcher:
        """The row's matcher, moved on to behind the output. Behind an end it stays: only ends may follow."""
        if row.matcher is None:
            row.matcher = self._compiled.matcher(row.grammar)
        new = output[row.num_consumed :].tolist()
        row.num_consumed = len(output)
        if new and not row.matcher.is_stopped():
            row.matcher.consume_tokens(new)
        return row.matcher
