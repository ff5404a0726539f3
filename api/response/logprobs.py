"""Logprobs in the two shapes of OpenAI's API, and vLLM's `prompt_logprobs`.

Half a character has no text: chat logprobs show U+FFFD and give the exact `bytes`; the older completions format has no such field
and shows `bytes:\\xe2\\x82`, as OpenAI does. Minus infinity is -9999.0, because JSON has no such number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec import Raw
from msgspec.json import encode as encode_json
from numpy.typing import NDArray

from api.response.output_processor import TokenLogprobs
from api.text.tokenizer import TextTokenizer
from engine.protocol import OutputPromptLogprobs, decode_column

MIN_LOGPROB = -9999.0
SLICE_TOKENS = 1024  # that are encoded at once, in 0.3 ms
Json = dict[str, Any]
T = TypeVar("T")
Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]
_Row = tuple[Ids, Logprobs, int]  # [1 + k] the token and the top k, their logprobs, and the token's rank
_Part = tuple[int, Ids, Logprobs, Ids]  # first position; [rows, 1 + k] token ids and logprobs; [rows] ranks


class LogprobsFormatter:
    """`as_token_ids`: tokens are shown as `token_id:N` instead of their text."""

    def __init__(self, tokenizer: TextTokenizer, as_token_ids: bool = False) -> None:
        self._tokenizer = tokenizer
        self._as_token_ids = as_token_ids

    def chat(self, entries: Sequence[TokenLogprobs], num_top: int) -> Json:
        """`{"content": [...]}`, an entry a token. `num_top`: top_logprobs of the request; -1: all there are."""
        return {"content": _listed(entries, lambda entry: self._chat_entry(entry, num_top), _width(entries))}

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
            "text_offset": _listed(entries, lambda entry: entry.text_offset),
            "token_logprobs": _listed(entries, lambda entry: max(entry.logprobs[0], MIN_LOGPROB) if entry.logprobs else None),
            "tokens": _listed(entries, self._shown_token),
            "top_logprobs": _listed(entries, lambda entry: self._completion_top(entry, num_top), _width(entries)),
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
        self._parts: list[_Part] = []
        self._known = np.zeros(len(prompt_token_ids), np.bool_)
        self._entries: list[TokenLogprobs] = []  # of the echo, once they were asked for

    @property
    def complete(self) -> bool:
        return int(np.count_nonzero(self._known)) >= len(self._prompt) - 1

    @property
    def num_logprobs(self) -> int:
        return sum(token_ids.size for _, token_ids, _, _ in self._parts)

    def add(self, part: OutputPromptLogprobs) -> None:
        """Parts may come again after a gap was healed; what is known is left alone."""
        ranks = decode_column(part.ranks)
        token_ids = decode_column(part.token_ids).reshape(len(ranks), -1)
        logprobs = decode_column(part.logprobs, np.float32).reshape(len(ranks), -1)
        self._parts.append((part.position, token_ids, logprobs, ranks))
        self._known[part.position : part.position + len(ranks)] = True

    def _rows(self) -> list[_Row | None]:
        """A row a prompt token; the first token has none."""
        rows: list[_Row | None] = [None] * len(self._prompt)
        for position, token_ids, logprobs, ranks in self._parts:
            for row in range(min(len(ranks), len(rows) - position)):
                if rows[position + row] is None:
                    rows[position + row] = (token_ids[row], logprobs[row], int(ranks[row]))
        return rows

    def entries(self, tokenizer: TextTokenizer, echo: str) -> Sequence[TokenLogprobs]:
        """An entry a prompt token for the text `echo`, in which the offsets count characters. A special token that the tokenizer
        has put around the text is not in it, and shown as nothing. Made once for all choices, when the rows are complete."""
        if not self._entries:
            self._entries = list(self._made_entries(tokenizer, echo))
        return self._entries

    def _made_entries(self, tokenizer: TextTokenizer, echo: str) -> Iterator[TokenLogprobs]:
        detokenizer = tokenizer.detokenizer((), skip_special_tokens=False)
        offset = 0
        for token_id, row in zip(self._prompt, self._rows(), strict=True):
            own = tokenizer.token_text(token_id)
            is_added = token_id in tokenizer.special_ids and not echo.startswith(own, offset)
            piece = "" if is_added else detokenizer.push(token_id)
            lost_its_space = own != piece == own.removeprefix(" ")  # SentencePiece's first one is not the text's
            text = piece if is_added or lost_its_space else None
            if row is None:
                yield TokenLogprobs(offset, [token_id], [], 0, text)
            else:
                yield TokenLogprobs(offset, row[0].tolist(), row[1].tolist(), row[2], text)
            offset += len(piece)

    def vllm(self, tokenizer: TextTokenizer) -> list[Json | None] | Raw:
        """`prompt_logprobs` of the response: a map from token id a position, null for the first token."""
        rows = self._rows()
        width = next((len(row[0]) for row in rows if row is not None), 1)
        return _listed(rows, lambda row: None if row is None else _vllm_row(tokenizer, *row), width)


def _vllm_row(tokenizer: TextTokenizer, token_ids: Ids, logprobs: Logprobs, rank: int) -> Json:
    row: Json = {}
    for place, (token_id, logprob) in enumerate(zip(token_ids.tolist(), logprobs.tolist(), strict=True)):
        if str(token_id) not in row:
            row[str(token_id)] = {
                "logprob": max(logprob, MIN_LOGPROB),
                "rank": rank if place == 0 else place,
                "decoded_token": tokenizer.token_text(token_id),
            }
    return row


def _listed(items: Sequence[T], shown: Callable[[T], Any], width: int = 1) -> list[Any] | Raw:
    """A JSON list of what `shown` makes of each item, which is about `width` tokens. A long list comes encoded, in slices:
    the encoder holds the interpreter's lock from its call to its end."""
    size = max(1, SLICE_TOKENS // width)
    if len(items) <= size:
        return [shown(item) for item in items]
    slices = (items[start : start + size] for start in range(0, len(items), size))
    return Raw(b"[%b]" % b",".join(encode_json([shown(item) for item in each])[1:-1] for each in slices))


def _width(entries: Sequence[TokenLogprobs]) -> int:
    return len(entries[-1].token_ids) if entries else 1
