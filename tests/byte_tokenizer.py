"""A tokenizer of bytes with one end token, as llguidance takes it: grammars can be tested without a model's vocabulary."""

from __future__ import annotations

from llguidance import LLTokenizer, TokenizerWrapper

END = 256


class _Bytes:
    def __init__(self, vocab_size: int) -> None:
        self.eos_token_id = END
        self.bos_token_id = None
        self.tokens = [*(bytes([byte]) for byte in range(256)), b"<end>", *[b""] * (vocab_size - 257)]
        self.special_token_ids = [END]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def byte_tokenizer(vocab_size: int = 257) -> LLTokenizer:
    """Tokens beyond those of the bytes and the end are no text."""
    return LLTokenizer(TokenizerWrapper(_Bytes(vocab_size)))
