"""A GGUF file's vocabulary: what its `tokenizer.*` metadata says, checked. Torch-free."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from gpu.checkpoint.fields import FLAG, NUMBER, TEXT, Rule, integer, list_of, shown
from gpu.checkpoint.gguf import GGUFFile
from gpu.errors import CheckpointError

ValueT = TypeVar("ValueT")
Merges = list[tuple[str, str]]

logger = logging.getLogger(__name__)

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type
_TOKEN_TYPE = integer(0, 255)
_KINDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_END_KINDS = ("eos", "eot", "eom")  # what they name ends a generation
_END_OF_TURN = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
_ADD_BOS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "tekken"}  # pre-tokenizers of models that begin so
_MOST_NAMED = 3  # merges in a warning


@dataclass(frozen=True)
class Vocabulary:
    """A GGUF file's `tokenizer.*` metadata. A warning tells of optional lists that do not fit the tokens, and of wrong ids."""

    source: str  # the file, as messages call it
    model: str  # gpt2 (byte-level BPE) | llama (SentencePiece)
    pre: str  # name of the pre-tokenizer
    tokens: list[str]
    types: list[int]  # one for each token
    scores: list[float] | None
    merges: Merges | None  # whose halves and result are tokens
    ids: dict[str, int]  # by kind: "bos", "eos", ...; only of tokens
    chat_template: str | None  # Jinja
    adds_bos: bool
    adds_eos: bool
    adds_space_prefix: bool

    @classmethod
    def read(cls, file: GGUFFile) -> Vocabulary:
        """Raises CheckpointError where the file has no tokenizer or a damaged one."""
        fields, lenient = file.fields, replace(file.fields, lenient=True)
        model, tokens = fields.get("tokenizer.ggml.model", TEXT), fields.get("tokenizer.ggml.tokens", list_of(TEXT))
        if model is None or not tokens:
            raise CheckpointError(f"{file.path} has no tokenizer (tokenizer.ggml.model and tokens)")
        pre = fields.get("tokenizer.ggml.pre", TEXT) or "default"
        named = {kind: lenient.get(f"tokenizer.ggml.{kind}_token_id", integer(0, len(tokens) - 1)) for kind in _KINDS}
        ids = {kind: number for kind, number in named.items() if number is not None}
        add_bos = lenient.get("tokenizer.ggml.add_bos_token", FLAG)
        if add_bos is None:
            add_bos = model == "llama" or pre in _ADD_BOS
        lines = fields.get("tokenizer.ggml.merges", list_of(TEXT))
        return cls(
            source=str(file.path),
            model=model,
            pre=pre,
            tokens=tokens,
            types=lenient.get("tokenizer.ggml.token_type", _one_each(tokens, _TOKEN_TYPE)) or [NORMAL] * len(tokens),
            scores=lenient.get("tokenizer.ggml.scores", _one_each(tokens, NUMBER)),
            merges=None if lines is None else _merges(str(file.path), lines, frozenset(tokens)),
            ids=ids,
            chat_template=fields.get("tokenizer.chat_template", TEXT),
            adds_bos=add_bos and "bos" in ids,
            adds_eos=(lenient.get("tokenizer.ggml.add_eos_token", FLAG) or False) and "eos" in ids,
            adds_space_prefix=lenient.get("tokenizer.ggml.add_space_prefix", FLAG) is not False,
        )

    def special_token(self, kind: str) -> str | None:
        """The text of the `kind` token ("bos", "eos", "unknown", "padding", ...), if the file names one."""
        return self.tokens[self.ids[kind]] if kind in self.ids else None

    @cached_property
    def token_ids(self) -> dict[str, int]:
        """Ids by text; the last one of equal tokens, as in llama.cpp."""
        return {token: index for index, token in enumerate(self.tokens)}

    @property
    def end_token_ids(self) -> list[int]:
        """Tokens that end a generation: end of sequence, of turn and of message, as the file names them.

        Older files name only the first; a known end-of-turn token that the chat template writes after each turn counts too.
        """
        found = [self.ids[kind] for kind in _END_KINDS if kind in self.ids]
        template = self.chat_template or ""
        found += [self.token_ids[token] for token in _END_OF_TURN if token in template and token in self.token_ids]
        return list(dict.fromkeys(found))


def _one_each(tokens: list[str], rule: Rule[ValueT]) -> Rule[list[ValueT]]:
    items = list_of(rule)
    description = f"{items.description}, one for each of the {len(tokens):,} tokens"
    return Rule(description, lambda value: items.accepts(value) and len(value) == len(tokens))


def _merges(source: str, lines: list[str], tokens: frozenset[str]) -> Merges:
    """The lines "left right" that join two tokens to a third. A warning tells of the others, which could make no token."""
    merges, others = [], []
    for line in lines:
        left, _, right = line.partition(" ")
        if left in tokens and right in tokens and left + right in tokens:
            merges.append((left, right))
        else:
            others.append(line)
    if others:
        named = ", ".join(map(shown, others[:_MOST_NAMED]))
        logger.warning(
            "%s: tokenizer.ggml.merges has %d merges of or to what is no token (%s); they are ignored", source, len(others), named
        )
    return merges
