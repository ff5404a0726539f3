"""Tokenizers in Redis, by content: an engine puts its model's there, an API server fetches it."""

from __future__ import annotations

from engine.bus import keys
from engine.bus.call import Call
from engine.protocol import TokenizerBundle, decode_bundle, encode


def put_tokenizer(model: str, content_hash: str, bundle: TokenizerBundle) -> Call[None]:
    return Call(lambda answers: None, commands=(("SET", keys.tokenizer(model, content_hash), encode(bundle)),))


def get_tokenizer(model: str, content_hash: str) -> Call[TokenizerBundle | None]:
    return Call(
        lambda answers: None if answers[0] is None else decode_bundle(answers[0]),
        commands=(("GET", keys.tokenizer(model, content_hash)),),
    )
