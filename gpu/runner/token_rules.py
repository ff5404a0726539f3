"""Rules of requests on single token ids: allowed ids, bad words, ends before `min_tokens`, logit bias; for all rows at once.

Each kind is a table of entries, changed when a row comes or goes. A step picks the entries of the rows that sample and applies each
kind in a few array operations, however many rows asked for it; a row that asks for nothing has no entry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from gpu.plan import INVALID_REQUEST, Int32Array, SamplingParams
from kernels.logit_bias import add_logit_bias

_ALLOWED = np.dtype([("row", np.int64), ("token", np.int64)])
_BIASED = np.dtype([("row", np.int64), ("token", np.int64), ("bias", np.float32)])
_ENDS = np.dtype([("row", np.int64), ("token", np.int64), ("min_tokens", np.int64)])
_BAD_WORDS = np.dtype([("row", np.int64), ("token", np.int64), ("length", np.int64)])  # the last token; how many stand before it


class Histories(NamedTuple):
    """The known tokens of each row."""

    token_ids: Int32Array  # [max_num_seqs, longest]
    num_tokens: Int32Array  # [max_num_seqs], prompt and output
    num_prompt_tokens: Int32Array  # [max_num_seqs]


class TokenRules:
    def __init__(self, max_num_seqs: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self._ruled = np.zeros(max_num_seqs, np.bool_)  # rows that have an entry
        self._allowed = np.zeros(0, _ALLOWED)
        self._biased = np.zeros(0, _BIASED)
        self._ends = np.zeros(0, _ENDS)
        self._bad_words = np.zeros(0, _BAD_WORDS)
        self._prefixes = np.zeros((0, 0), np.int32)  # [bad words, longest length]: what stands before the last token, at the right

    def __len__(self) -> int:
        """Entries of all rows."""
        return len(self._allowed) + len(self._biased) + len(self._ends) + len(self._bad_words)

    def set(self, row: int, sampling: SamplingParams) -> str | None:
        """Takes in a row without entries. Returns why it cannot be sampled when it names tokens that the model does not have."""
        words = [word for word in sampling.bad_words_token_ids if word]
        named = [*sampling.allowed_token_ids, *sampling.logit_bias, *(token for word in words for token in word)]
        if named and not 0 <= min(named) <= max(named) < self.vocab_size:
            return f"{INVALID_REQUEST}its sampling parameters name a token id outside the vocabulary of {self.vocab_size}"
        ends = sampling.held_back_token_ids
        self._ruled[row] = bool(named or ends)  # first: were anything wrong below, `clear` would still take back what went in
        self._allowed = _extend(self._allowed, ((row, token) for token in sampling.allowed_token_ids))
        self._biased = _extend(self._biased, ((row, *pair) for pair in sampling.logit_bias.items()))
        self._ends = _extend(self._ends, ((row, end, sampling.min_tokens) for end in ends if 0 <= end < self.vocab_size))
        self._add_bad_words(row, words)
        return None

    def clear(self, row: int) -> None:
        if not self._ruled[row]:
            return
        self._ruled[row] = False
        self._allowed, self._biased, self._ends = (
            entries[entries["row"] != row] for entries in (self._allowed, self._biased, self._ends)
        )
        kept = self._bad_words["row"] != row
        self._bad_words, self._prefixes = self._bad_words[kept], self._prefixes[kept]

    def _add_bad_words(self, row: int, words: list[list[int]]) -> None:
        if not words:
            return
        width = max(self._prefixes.shape[1], max(map(len, words)) - 1)
        prefixes = np.zeros((len(self._prefixes) + len(words), width), np.int32)
        prefixes[: len(self._prefixes), width - self._prefixes.shape[1] :] = self._prefixes
        for line, word in zip(prefixes[len(self._prefixes) :], words, strict=True):
            line[width - len(word) + 1 :] = word[:-1]
        self._prefixes = prefixes
        self._bad_words = _extend(self._bad_words, ((row, word[-1], len(word) - 1) for word in words))

    def apply(self, logits: torch.Tensor, rows: Int32Array, histories: Histories) -> None:
        """logits [num_rows, vocab] float32, changed in place; logits[i] are of row rows[i]."""
        if not self._ruled[rows].any():
            return
        place_of = np.full(len(self._ruled), -1)
        place_of[rows] = np.arange(len(rows))
        num_output = histories.num_tokens - histories.num_prompt_tokens
        self._keep_allowed(logits, place_of)
        ends = self._ends[num_output[self._ends["row"]] < self._ends["min_tokens"]]
        _ban(logits, place_of, ends)
        _ban(logits, place_of, self._bad_words[self._would_complete(histories, num_output)])
        biased = _of_step(self._biased, place_of)
        if len(biased):
            add_logit_bias(logits, *_indices(biased, place_of, logits.device), _column(biased["bias"], logits.device))

    def _keep_allowed(self, logits: torch.Tensor, place_of: np.ndarray) -> None:
        allowed = _of_step(self._allowed, place_of)
        if len(allowed):
            places, tokens = _indices(allowed, place_of, logits.device)
            kept = logits[places, tokens]
            logits[_column(np.unique(place_of[allowed["row"]]), logits.device)] = -torch.inf
            logits[places, tokens] = kept

    def _would_complete(self, histories: Histories, num_output: Int32Array) -> np.ndarray:
        """[bad words] bool: the row's output ends in all of the word but its last token."""
        rows, lengths = self._bad_words["row"], self._bad_words["length"]
        width = self._prefixes.shape[1]
        positions = histories.num_tokens[rows, None] - width + np.arange(width)
        same = histories.token_ids[rows[:, None], np.maximum(positions, 0)] == self._prefixes
        beyond = np.arange(width) < width - lengths[:, None]
        completes: np.ndarray = (same | beyond).all(axis=1) & (lengths <= num_output[rows])
        return completes


def _extend(entries: np.ndarray, more: Iterable[tuple[float, ...]]) -> np.ndarray:
    added = np.fromiter(more, entries.dtype)
    return np.concatenate((entries, added)) if len(added) else entries


def _of_step(entries: np.ndarray, place_of: np.ndarray) -> np.ndarray:
    """Those of rows that have a place in the step."""
    found: np.ndarray = entries[place_of[entries["row"]] >= 0]
    return found


def _indices(entries: np.ndarray, place_of: np.ndarray, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    return _column(place_of[entries["row"]], device), _column(entries["token"], device)


def _column(values: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(values.copy()).to(device)


def _ban(logits: torch.Tensor, place_of: np.ndarray, entries: np.ndarray) -> None:
    banned = _of_step(entries, place_of)
    if len(banned):
        logits[_indices(banned, place_of, logits.device)] = -torch.inf
