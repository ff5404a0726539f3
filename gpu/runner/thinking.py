"""Rows whose reasoning may have so many tokens: behind them the sampler can choose nothing but the mark that ends it.

A row's state follows from its output alone, so preemption and failover need nothing of it.
"""

from __future__ import annotations

import numpy as np
import torch

from gpu.plan import INVALID_REQUEST, Int32Array, ThinkingBudget
from gpu.runner.token_rules import Histories

MOST_BLANKS = 8  # tokens that may stand before the opening: later it is content


class ThinkingBudgets:
    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._budgets: dict[int, ThinkingBudget] = {}  # by row, until the row's reasoning has ended

    def set(self, row: int, thinking: ThinkingBudget | None) -> str | None:
        """Returns why the row cannot be sampled when it names tokens that the model does not have."""
        self.clear(row)
        if thinking is None:
            return None
        if max(thinking.opening, thinking.closing) >= self._vocab_size:
            return f"{INVALID_REQUEST}its marks of reasoning are outside the vocabulary of {self._vocab_size}"
        self._budgets[row] = thinking
        return None

    def clear(self, row: int) -> None:
        self._budgets.pop(row, None)

    def apply(self, logits: torch.Tensor, rows: Int32Array, histories: Histories) -> None:
        """logits [num_rows, vocab] float32, changed in place; logits[i] are of row rows[i]."""
        if not self._budgets:
            return
        for place, row in enumerate(rows.tolist()):
            thinking = self._budgets.get(row)
            if thinking is not None and self._is_spent(row, thinking, histories):
                logits[place] = -torch.inf
                logits[place, thinking.closing] = 0.0

    def _is_spent(self, row: int, thinking: ThinkingBudget, histories: Histories) -> bool:
        """The row's reasoning has its budget, and has not ended."""
        output = histories.token_ids[row, histories.num_prompt_tokens[row] : histories.num_tokens[row]]
        begin = 0
        if not thinking.is_open:
            openings = np.flatnonzero(output[: MOST_BLANKS + 1] == thinking.opening)
            if not len(openings):
                if len(output) > MOST_BLANKS:  # the answer does not reason
                    self.clear(row)
                return False
            begin = int(openings[0]) + 1
        if (output[begin:] == thinking.closing).any():
            self.clear(row)
            return False
        return len(output) - begin >= thinking.budget
