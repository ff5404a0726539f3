"""A model's tokenizer as the API server needs it: text to ids, ids to text, and the bytes behind each id.

Made from the `TokenizerBundle` that the engine put into Redis, so that API servers need no model files.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from api.errors import BadRequest
from api.text.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer, TokenBytes, unfinished_tail
from engine.protocol import TokenizerBundle

GUARD = "\ufdd0"  # put into a special token's spelling; a code point that is no character (Unicode, section 23.7)
SPACE = "\u2581"  # SentencePiece writes a space as this
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SEQUENCES = ("normalizers", "pretokenizers", "decoders")  # where a sequence keeps its steps, by the kind of component
_KEEP_ALL_BYTES = frozenset({"ByteLevel", "Split", "Digits", "Metaspace", "Prepend"})  # steps that take nothing out of a text
_SENTENCEPIECE_DECODERS = frozenset({"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"})


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class _Model(msgspec.Struct):
    type: str | None = None
    byte_fallback: bool = False


class _TokenizerFile(msgspec.Struct):
    """The parts of tokenizer.json (https://huggingface.co/docs/tokenizers/api/tokenizer) that are read here."""

    model: _Model = msgspec.field(default_factory=_Model)
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None
    added_tokens: list[_AddedToken] = []


class TextTokenizer:
    """Thread-safe. `encode` and `decode` leave the interpreter to other threads while they work: of the library's functions only
    those for batches release its lock."""

    def __init__(self, bundle: TokenizerBundle) -> None:
        file = msgspec.json.decode(bundle.tokenizer_json, type=_TokenizerFile)
        self._tokenizer: Any = Tokenizer.from_str(bundle.tokenizer_json)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.eos_token_ids = list(bundle.eos_token_ids)
        self.special_ids = frozenset(token.id for token in file.added_tokens if token.special)
        self.added_ids = {token.content: token.id for token in file.added_tokens}
        tokens = self._id_to_token()
        self.vocab_size = len(tokens)
        self.max_chars_per_token = max((len(token) for token in tokens), default=1)
        self.bytes = _make_token_bytes(file, tokens, self.special_ids)
        self._least_share = _least_shares(file, self.bytes)
        contents = sorted((token.content for token in file.added_tokens if token.special and len(token.content) > 1), key=len)
        self._special = re.compile("|".join(map(re.escape, reversed(contents)))) if contents else None
        self._json = bundle.tokenizer_json

    @cached_property
    def _text_only(self) -> Any:
        """The tokenizer to which special tokens are text as any other. Made for the first text that spells one: it takes as much
        time and memory as the other."""
        tokenizer: Any = Tokenizer.from_str(self._json)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = True
        return tokenizer

    def _id_to_token(self) -> list[str]:
        vocab: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        tokens = [""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            tokens[token_id] = token
        return tokens

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Special tokens that are spelled in `text` become such, unless they were guarded. Raises BadRequest for text that is not
        Unicode (a lone surrogate, which JSON can spell)."""
        if GUARD in text and self._special is not None:
            return self._encode_guarded(text, add_special_tokens)
        return self._encode(self._tokenizer, text, add_special_tokens)

    def guarded(self, value: Any) -> Any:
        """`value`, a string or what JSON makes of strings, in which special tokens that are spelled are only text to `encode`."""
        if isinstance(value, str):
            while self._special is not None and self._special.search(value):  # breaking some may leave others
                value = self._special.sub(lambda found: found[0][0] + GUARD + found[0][1:], value)
            return value
        if isinstance(value, list):
            return [self.guarded(item) for item in value]
        if isinstance(value, dict):
            return {self.guarded(name): self.guarded(item) for name, item in value.items()}
        return value

    def unguarded(self, text: str) -> str:
        return text.replace(GUARD, "")

    def _encode_guarded(self, text: str, add_special_tokens: bool) -> list[int]:
        """The tokenizer takes special tokens out first and the text between them piece by piece; so does this."""
        assert self._special is not None
        ids: list[int] = []
        trusted = ""
        for piece in re.split(f"({self._special.pattern})", text):
            if GUARD not in piece:
                trusted += piece
                continue
            ids += self._encode(self._tokenizer, trusted, False)
            ids += self._encode(self._text_only, self.unguarded(piece), False)
            trusted = ""
        ids += self._encode(self._tokenizer, trusted, False)
        if not add_special_tokens:
            return ids
        inside, whole = (self._encode(self._tokenizer, "a", added) for added in (False, True))
        before = next(place for place in range(len(whole)) if whole[place : place + len(inside)] == inside)
        return [*whole[:before], *ids, *whole[before + len(inside) :]]

    def _encode(self, tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
        try:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except (TypeError, UnicodeEncodeError) as error:
            raise BadRequest("Text with lone surrogates cannot be encoded.", param="prompt") from error
        ids: list[int] = encoding.ids
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the tokens that `text` becomes, found in a thousandth of encoding's time; 0 where none is known. A guard
        is no part of the text that `encode` counts."""
        if self._least_share is None:
            return 0
        data = np.frombuffer(self.unguarded(text).encode("utf-8", "replace"), np.uint8)
        return math.ceil(float(np.bincount(data, minlength=256) @ self._least_share) - 1e-6)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        (text,) = self._tokenizer.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)
        return str(text)

    def echo_text(self, token_ids: Sequence[int]) -> str:
        """Text of a prompt given as tokens, without a character that it leaves unfinished (the output's detokenizer has that)."""
        if self.bytes is None:
            return self.decode(token_ids)
        data = b"".join(self.bytes.piece(token_id) for token_id in token_ids)
        return data[: len(data) - len(unfinished_tail(data))].decode("utf-8", "replace")

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None outside of it."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token alone; half a character is possible."""
        if self.bytes is not None:
            return self.bytes.piece(token_id)
        return self.decode([token_id]).encode()

    def token_text(self, token_id: int) -> str:
        """A token alone as text; U+FFFD for half a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def detokenizer(
        self,
        prompt_token_ids: Sequence[int],
        skip_special_tokens: bool = True,
        keep_prompt_tail: bool = False,
        kept: Sequence[str] = (),
    ) -> Detokenizer:
        """A detokenizer for output that follows `prompt_token_ids`. `kept`: special tokens that are shown all the same."""
        kept_ids = frozenset(self.added_ids[content] for content in kept if content in self.added_ids)
        if self.bytes is not None:
            return ByteDetokenizer(self.bytes, prompt_token_ids, skip_special_tokens, keep_prompt_tail, kept_ids)
        return StreamDetokenizer(self._tokenizer, prompt_token_ids, skip_special_tokens, kept_ids)


def _steps(component: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as the list of its steps."""
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [step for name in _SEQUENCES for child in component.get(name, []) for step in _steps(child)]
    return [component]


def _make_token_bytes(file: _TokenizerFile, tokens: list[str], special_ids: frozenset[int]) -> TokenBytes | None:
    """The byte table, or None where the decoder is not a map of tokens to bytes."""
    parts = _steps(file.decoder)
    kinds = {part.get("type") for part in parts}
    added = {token.id: token.content for token in file.added_tokens}
    if kinds and kinds <= {"ByteLevel", "Fuse"}:
        pieces = [_byte_level_piece(token) for token in tokens]
        strips = False
    elif kinds and kinds <= _SENTENCEPIECE_DECODERS and _replaces_spaces(parts):
        pieces = [_sentencepiece_piece(token) for token in tokens]
        strips = bool(kinds & {"Strip", "Metaspace"})
    else:
        return None
    for token_id, content in added.items():
        if 0 <= token_id < len(pieces):
            pieces[token_id] = content.encode()
    return TokenBytes(pieces, special_ids, strips)


def _least_shares(file: _TokenizerFile, table: TokenBytes | None) -> NDArray[np.float64] | None:
    """[256] for each byte, 1 / the length of the longest token that it occurs in: the least share of a token that it takes.

    Their sum over a text is a lower bound of its tokens, where tokens are bytes of the text one behind the other. None where that
    is not certain.
    """
    if table is None or not (file.model.byte_fallback or _steps(file.decoder)[0]["type"] == "ByteLevel"):
        return None
    if not all(_keeps_all_bytes(step) for step in (*_steps(file.normalizer), *_steps(file.pre_tokenizer))):
        return None
    data = np.frombuffer(b"".join(table.pieces), np.uint8)
    lengths = np.array([len(piece) for piece in table.pieces])
    longest = np.zeros(256)
    np.maximum.at(longest, data, np.repeat(lengths, lengths))
    single = np.array([piece[0] for piece in table.pieces if len(piece) == 1], np.uint8)
    shares = np.zeros(256)  # stays 0 for a byte that is no token: its tokens are unknown
    shares[single] = 1 / longest[single]
    if any(token.lstrip or token.rstrip for token in file.added_tokens):
        shares[list(b" \t\n\r\x0b\x0c")] = 0  # any number of them may be swallowed
    return shares


def _keeps_all_bytes(step: dict[str, Any]) -> bool:
    kind = step.get("type")
    if kind == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == SPACE
    return kind in _KEEP_ALL_BYTES and step.get("behavior") != "Removed"


def _replaces_spaces(parts: list[dict[str, Any]]) -> bool:
    for part in parts:
        if part["type"] == "Replace" and (part.get("pattern") != {"String": SPACE} or part.get("content") != " "):
            return False
        if part["type"] == "Metaspace" and part.get("replacement", SPACE) != SPACE:
            return False
    return any(part["type"] in ("Replace", "Metaspace") for part in parts)


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes stand for themselves, the others for code points from 256 on.

    Source: Radford et al. 2019, byte-level BPE; `bytes_to_unicode` of the released encoder.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_alphabet()


def _byte_level_piece(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # not of the alphabet: an added token, which stands for itself
        return token.encode()


def _sentencepiece_piece(token: str) -> bytes:
    if match := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(match[1], 16)])
    return token.replace(SPACE, " ").encode()
