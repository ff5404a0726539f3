"""What is known of a text's tokens before it is tokenized, and who goes on meanwhile."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from api.text.tokenizer import TextTokenizer
from engine.protocol import TokenizerBundle

BUNDLE = TokenizerBundle("", None, None, None, [], {})
WORDS = st.sampled_from([" ", "  ", "\n", "a", "語", "語語", "the", "=", "ab", "é", "😀", "<|end|>", "hello"])


def sentencepiece(**changes: Any) -> TextTokenizer:
    """Llama's kind: spaces are U+2581, characters out of the vocabulary are bytes."""
    words = ["\u2581", "a", "b", "ab", "abab", "\u2581ab", "h", "e", "he", "l"]
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    merges = [("a", "b"), ("ab", "ab"), ("\u2581", "ab"), ("h", "e")]
    model = models.BPE({piece: number for number, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    library: Any = Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    library.add_special_tokens([AddedToken("<|end|>", **changes)])
    return TextTokenizer(structs.replace(BUNDLE, tokenizer_json=library.to_str()))


SENTENCEPIECE, SWALLOWING = sentencepiece(), sentencepiece(lstrip=True)


@given(st.lists(WORDS | st.text(max_size=4)))
@pytest.mark.parametrize("kind", ["smollm2", "sentencepiece", "swallowing"])
def test_never_more_than_there_are(tokenizer: TextTokenizer, kind: str, words: list[str]) -> None:
    text = "".join(words)
    tested = {"smollm2": tokenizer, "sentencepiece": SENTENCEPIECE, "swallowing": SWALLOWING}[kind]
    assert tested.fewest_tokens(text) <= len(tested.encode(text, add_special_tokens=False))


def test_a_bound_that_is_worth_its_name(tokenizer: TextTokenizer) -> None:
    assert tokenizer.fewest_tokens("語" * 1000) > 500
    assert SENTENCEPIECE.fewest_tokens("語" * 1000) == 3000
    assert SENTENCEPIECE.fewest_tokens("a" * 1000) == 250


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": "\u2581"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
    ],
)
def test_where_text_may_vanish_nothing_is_known(change: dict[str, Any]) -> None:
    library: Any = Tokenizer(models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True))
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback()])
    known, unknown = (
        TextTokenizer(structs.replace(BUNDLE, tokenizer_json=json.dumps({**json.loads(library.to_str()), **more})))
        for more in ({}, change)
    )
    assert (known.fewest_tokens("abc"), unknown.fewest_tokens("abc")) == (3, 0)


def test_unknown_characters_that_fuse_have_no_bound() -> None:
    library: Any = Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>", fuse_unk=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    assert TextTokenizer(structs.replace(BUNDLE, tokenizer_json=library.to_str())).fewest_tokens("語" * 10) == 0


@pytest.mark.parametrize("work", ["encode", "decode"])
def test_other_threads_go_on(tokenizer: TextTokenizer, work: str) -> None:
    token_ids = tokenizer.encode("語" * 50_000)
    calls: dict[str, Callable[[], object]] = {
        "encode": lambda: tokenizer.encode("語" * 50_000),
        "decode": lambda: tokenizer.decode(token_ids * 4),
    }
    thread = threading.Thread(target=calls[work])
    turns = 0
    thread.start()
    while thread.is_alive():
        turns += 1
        time.sleep(0.0005)
    assert turns > 10
