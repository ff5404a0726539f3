"""Logprobs in the two shapes of OpenAI's API, and vLLM's `prompt_logprobs`.

Half a character has no text: chat logprobs show U+FFFD and give the exact `bytes`; the older completions format has no such field
and shows `bytes:\\xe2\\x82`, as OpenAI does. Minus infinity is -9999.0, because JSON has no such number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from api.response.output_processor import TokenLogprobs
from api.text.tokenizer import TextTokenizer
from engine.protocol import OutputPromptLogprobs, decode_column

MIN_LOGPROB = -9999.0
Json = dict[str, Any]


class LogprobsFormatter:
    """`as_token_ids`: tokens are shown as `token_id:N` instead of their text."""

    def __init__(self, tokenizer: TextTokenizer, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def chat(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """`{"content": [...]}`, an entry a token. `num_top`: top_logprobs of the request; -1: all there are."""
        return {"content": [self._chat_entry(entry, num_top) for entry in entries]}

    def _chat_entry(self, entry: TokenLogprobs, num_top: int) -> Json:
        top = slice(1, None if num_top < 0 else 1 + num_top)
        own = self._chat_token(entry.token_ids[0], entry.logprobs[0])
        own["top_logprobs"] = [
            self._chat_token(token_id, value) for token_id, value in zip(entry.token_ids[top], entry.logprobs[top], strict=True)
        ]
        return own

    def _chat_token(self, token_id: int, logprob: float) -> Json:
        piece = self._tokenizer.token_bytes(token_id)
        token = f"token_id:{token_id}" if self._as_token_ids else piece.decode("utf-8", "replace")
        return {"token": token, "logprob": max(logprob, MIN_LOGPROB), "bytes": list(piece)}

    def completion(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """Four lists beside each other, an item a token. An entry without numbers (the first prompt token) gives nulls."""
        return {
            "text_offset": [entry.text_offset for entry in entries],
            "token_logprobs": [max(entry.logprobs[0], MIN_LOGPROB) if entry.logprobs else None for entry in entries],
            "tokens": [self._shown_token(entry) for entry in entries],
            "top_logprobs": [self._completion_top(entry, num_top) for entry in entries],
        }

    def _completion_top(self, entry: TokenLogprobs, num_top: int) -> dict[str, float] | None:
        if not entry.logprobs:
            return None
        last = None if num_top < 0 else 1 + num_top
        pairs = zip(entry.token_ids[1:last], entry.logprobs[1:last], strict=True)
        top = {self._completion_token(entry.token_ids[0]): max(entry.logprobs[0], MIN_LOGPROB)}
        for token_id, value in pairs:
            top.setdefault(self._completion_token(token_id), max(value, MIN_LOGPROB))
        return top

    def _shown_token(self, entry: TokenLogprobs) -> str:
        if entry.text is None or self._as_token_ids:
            return self._completion_token(entry.token_ids[0])
        return entry.text

    def _completion_token(self, token_id: int) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        piece = self._tokenizer.token_bytes(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class PromptLogprobsCollector:
    """Logprobs of one prompt's tokens, from the parts in which a chunked prefill computes them."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self._prompt = prompt_token_ids
        self._rows: dict[int, tuple[list[int], list[float], int]] = {}  # by position; few requests ask for them
        self._entries: list[TokenLogprobs] = []  # of the echo, once they were asked for

    @property
    def complete(self) -> bool:
        return len(self._rows) >= len(self._prompt) - 1

    def add(self, part: OutputPromptLogprobs) -> None:
        """Parts may come again after a gap was healed; what is known is left alone."""
        ranks = decode_column(part.ranks)
        token_ids = decode_column(part.token_ids).reshape(len(ranks), -1)
        logprobs = decode_column(part.logprobs, np.float32).reshape(len(ranks), -1)
        for row in range(len(ranks)):
            position = part.position + row
            if position < len(self._prompt) and position not in self._rows:
                self._rows[position] = (token_ids[row].tolist(), logprobs[row].tolist(), int(ranks[row]))

    def entries(self, tokenizer: TextTokenizer, echo: str) -> Sequence[TokenLogprobs]:
        """An entry a prompt token for the text `echo`, in which the offsets count characters. A special token that the tokenizer
        has put around the text is not in it, and shown as nothing. Made once for all choices, when the rows are complete."""
        if not self._entries:
            self._entries = list(self._made_entries(tokenizer, echo))
        return self._entries

    def _made_entries(self, tokenizer: TextTokenizer, echo: str) -> Iterator[TokenLogprobs]:
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
        offset = 0
        for position, token_id in enumerate(self._prompt):
            row = self._rows.get(position)
            own = tokenizer.token_text(token_id)
            is_added = token_id in tokenizer.special_ids and not echo.startswith(own, offset)
            piece = "" if is_added else detokenizer.push(token_id)
            lost_its_space = own != piece == own.removeprefix(" ")  # SentencePiece's first one is not the text's
            text = piece if is_added or lost_its_space else None
            token_ids, logprobs, rank = ([token_id], [], 0) if row is None else row
            yield TokenLogprobs(offset, token_ids, logprobs, rank, text)
            offset += len(piece)

    def vllm(self, tokenizer: TextTokenizer) -> list[Json | None]:
        """`prompt_logprobs` of the response: a map from token id a position, null for the first token."""
        rows = map(self._rows.get, range(len(self._prompt)))
        return [None if row is None else _vllm_row(tokenizer, *row) for row in rows]


def _vllm_row(tokenizer: TextTokenizer, token_ids: list[int], logprobs: list[float], rank: int) -> Json:
    row: Json = {}
    for place, (token_id, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        if str(token_id) not in row:
            row[str(token_id)] = {
                "logprob": max(logprob, MIN_LOGPROB),
                "rank": rank if place == 0 else place,
                "decoded_token": tokenizer.token_text(token_id),
            }
    return row
