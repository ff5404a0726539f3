"""Detokenization: one token at a time gives what a whole decode gives, never half a character, never anything twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from api.text.detokenizer import ByteDetokenizer, Detokenizer, StreamDetokenizer, unfinished_tail
from api.text.tokenizer import TextTokenizer
from engine.protocol import TokenizerBundle

VOCAB = 49152
TEXTS = [
    "👩‍👩‍👧‍👦🏳️‍🌈",
    "汉字かな交じり文と한국어",
    "e\u0301a\u0308\u0304 naïve Zoë",
    "\U0001f468\u200d🚀 \u0e01\u0e33",
    "\U0001d573\U0001d58a",
]


def run(detokenizer: Detokenizer, token_ids: list[int]) -> list[str]:
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@given(st.lists(st.integers(0, VOCAB - 1), max_size=40), st.booleans())
def test_pushes_add_up_to_the_whole_decode(tokenizer: TextTokenizer, token_ids: list[int], skip: bool) -> None:
    assert "".join(run(tokenizer.detokenizer([40], skip), token_ids)) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(st.lists(st.integers(0x80, 0xFF), max_size=12))
def test_bytes_that_never_become_characters_equal_the_whole_decode(tokenizer: TextTokenizer, values: list[int]) -> None:
    assert tokenizer.bytes is not None
    by_piece = {piece: token_id for token_id, piece in enumerate(tokenizer.bytes.pieces) if len(piece) == 1}
    token_ids = [by_piece[bytes([value])] for value in values if bytes([value]) in by_piece]
    assert "".join(run(tokenizer.detokenizer([40]), token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("text", TEXTS)
def test_characters_cut_across_tokens_are_never_shown_in_halves(tokenizer: TextTokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text)
    assert len(token_ids) > 1
    parts = run(tokenizer.detokenizer([40]), token_ids)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == text


@pytest.mark.parametrize("text", TEXTS)
def test_an_output_begins_with_the_character_that_the_prompt_cut(tokenizer: TextTokenizer, text: str) -> None:
    """Wherever the prompt is cut, the output begins with the character that it left unfinished, and shows nothing before it."""
    token_ids = tokenizer.encode("The prompt: " + text)
    whole = tokenizer.decode(token_ids)
    for cut in range(1, len(token_ids)):
        shown = tokenizer.echo_text(token_ids[:cut])
        for detokenizer in (
            tokenizer.detokenizer(token_ids[:cut]),
            tokenizer.detokenizer(token_ids[:cut], keep_prompt_tail=True),
        ):
            assert shown + "".join(run(detokenizer, token_ids[cut:])) == whole


def test_a_cut_character_that_the_output_does_not_finish_is_shown_only_in_an_echo(tokenizer: TextTokenizer) -> None:
    """Its bytes are the prompt's: without an echo the output does not answer for them, with one they are shown as U+FFFD."""
    emoji = tokenizer.encode("🚀")
    assert len(emoji) > 1
    after = tokenizer.encode(" ok")
    assert "".join(run(tokenizer.detokenizer(emoji[:-1]), after)) == " ok"
    assert "".join(run(tokenizer.detokenizer(emoji[:-1]), [])) == ""
    assert "".join(run(tokenizer.detokenizer(emoji[:-1], keep_prompt_tail=True), after)) == "\ufffd ok"


def test_special_tokens_are_skipped_or_shown(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("<|im_start|>Hi<|im_end|>")
    assert "".join(run(tokenizer.detokenizer([40]), token_ids)) == "Hi"
    assert "".join(run(tokenizer.detokenizer([40], skip_special_tokens=False), token_ids)) == "<|im_start|>Hi<|im_end|>"


def test_ids_outside_of_the_vocabulary_show_nothing(tokenizer: TextTokenizer) -> None:
    assert run(tokenizer.detokenizer([40]), [VOCAB, 10**9]) == ["", "", ""]


@pytest.mark.parametrize(
    ("data", "tail"), [(b"abc", b""), (b"ab\xe2\x82", b"\xe2\x82"), (b"\xff", b""), ("é".encode(), b""), (b"\xf0", b"\xf0")]
)
def test_the_unfinished_tail_of_bytes_is_found(data: bytes, tail: bytes) -> None:
    assert unfinished_tail(data) == tail


# Tokenizers of other kinds


def byte_fallback_tokenizer() -> TextTokenizer:
    """SentencePiece's shape: spaces as U+2581, 256 byte tokens, a leading space that a whole decode drops."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    for piece in ("\u2581", "H", "i", "\u2581Hi", "\u2581the", "re", "e", "\u00e9"):
        vocab.setdefault(piece, len(vocab))
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return TextTokenizer(TokenizerBundle(backend.to_str(), None, "<s>", "</s>", [2], {}))


def word_level_tokenizer() -> TextTokenizer:
    """A decoder that joins words with spaces: no map of tokens to bytes."""
    backend = Tokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##ing": 2, "world": 3}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.WordPiece()
    return TextTokenizer(TokenizerBundle(backend.to_str(), None, None, None, [], {}))


def test_byte_fallback_goes_through_the_byte_table() -> None:
    tokenizer = byte_fallback_tokenizer()
    euro = [3 + byte for byte in "€".encode()]
    hi = tokenizer.bytes.pieces.index(b" Hi") if tokenizer.bytes else -1
    assert isinstance(tokenizer.detokenizer([1]), ByteDetokenizer)
    assert run(tokenizer.detokenizer([hi]), [hi, *euro, hi]) == [" Hi", "", "", "€", " Hi", ""]
    assert "".join(run(tokenizer.detokenizer([1]), [hi, hi])) == tokenizer.decode([hi, hi]) == "Hi Hi"


@given(st.lists(st.integers(0, 266), min_size=1, max_size=20))
@settings(max_examples=50)
def test_byte_fallback_of_whole_characters_equals_the_decode(token_ids: list[int]) -> None:
    tokenizer = byte_fallback_tokenizer()
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in whole:  # the library replaces a broken run byte by byte, Unicode by maximal subparts
        assert "".join(run(tokenizer.detokenizer([1]), token_ids)) == whole


def test_other_decoders_stream_through_the_library() -> None:
    tokenizer = word_level_tokenizer()
    detokenizer = tokenizer.detokenizer([3])
    assert isinstance(detokenizer, StreamDetokenizer)
    token_ids = [1, 2, 3, 1]
    assert "".join(run(detokenizer, token_ids)) == tokenizer.decode([3, *token_ids]).removeprefix(tokenizer.decode([3]))


@given(st.lists(st.integers(0, VOCAB - 1), max_size=30))
@settings(max_examples=50)
def test_the_library_stream_loses_and_repeats_nothing(tokenizer: TextTokenizer, token_ids: list[int]) -> None:
    """The same tokens through DecodeStream, resets included, as long as all characters are whole."""
    whole = tokenizer.decode(token_ids, skip_special_tokens=True)
    if "\ufffd" not in whole:
        assert "".join(run(StreamDetokenizer(tokenizer._tokenizer, [40]), token_ids)) == whole


def test_the_library_stream_shows_no_prompt_again_that_ends_inside_a_character(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("Launch: 🚀 now")
    cut = next(i for i in range(1, len(token_ids)) if tokenizer.decode(token_ids[:i]).endswith("\ufffd"))
    shown = "".join(run(StreamDetokenizer(tokenizer._tokenizer, token_ids[:cut]), token_ids[cut:]))
    assert shown.endswith(" now")
    assert "Launch" not in shown


def test_special_tokens_that_are_kept_are_shown(tokenizer: TextTokenizer) -> None:
    """Where the others are not: the marks of tool calls may be such."""
    start, end = (tokenizer.added_ids[content] for content in ("<|im_start|>", "<|im_end|>"))
    token_ids = [*tokenizer.encode("a b", False), start, end, *tokenizer.encode(" c", False)]
    assert "".join(run(tokenizer.detokenizer([40], kept=("<|im_start|>", "none")), token_ids)) == "a b<|im_start|> c"
    stream = StreamDetokenizer(tokenizer._tokenizer, [40], kept_ids=frozenset({start}))
    assert "".join(run(stream, token_ids)) == "a b<|im_start|> c"
