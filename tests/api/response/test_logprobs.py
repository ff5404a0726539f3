"""Logprobs in both formats."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from msgspec import Raw
from msgspec.json import encode
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from api.response.logprobs import LogprobsFormatter, PromptLogprobsCollector
from api.response.output_processor import TokenLogprobs
from api.text.tokenizer import TextTokenizer
from engine.protocol import OutputPromptLogprobs, TokenizerBundle, encode_column


def part(position: int, rows: list[list[int]]) -> OutputPromptLogprobs:
    values = [[-0.5 - column for column in range(len(row))] for row in rows]
    return OutputPromptLogprobs(
        1, position, encode_column(rows), encode_column(values, np.float32), encode_column(range(1, len(rows) + 1))
    )


def test_long_lists_are_the_same_json_as_short_ones(tokenizer: TextTokenizer) -> None:
    token_ids = list(range(40, 40 + 3000))
    collector = PromptLogprobsCollector(token_ids)
    collector.add(part(1, [[token_id, 7] for token_id in token_ids[1:]]))
    formatter, entries = LogprobsFormatter(tokenizer), collector.entries(tokenizer, tokenizer.echo_text(token_ids))
    long, short = ({**formatter.completion(some, 1), **formatter.chat(some[1:], 1)} for some in (entries, entries[-2:]))
    assert all(isinstance(values, Raw) for values in long.values())
    read = json.loads(encode(long))
    assert {name: len(values) for name, values in read.items()} == {**dict.fromkeys(long, 3000), "content": 2999}
    assert {name: values[-2:] for name, values in read.items() if name != "content"} == {
        name: values for name, values in json.loads(encode(short)).items() if name != "content"
    }
    assert read["content"][-1:] == json.loads(encode(short))["content"]
    prompt = json.loads(encode(collector.vllm(tokenizer)))
    assert (len(prompt), prompt[0], list(prompt[2999])) == (3000, None, ["3039", "7"])


def test_half_a_character_has_bytes(tokenizer: TextTokenizer) -> None:
    first, *_ = tokenizer.encode("🚀")
    entry = TokenLogprobs(0, [first, first], [-1.0, -1.0], 1)
    (content,) = LogprobsFormatter(tokenizer).chat([entry], 1)["content"]
    assert content["token"] == "\ufffd"
    assert bytes(content["bytes"]) == "🚀".encode()[: len(content["bytes"])]
    assert content["top_logprobs"] == [{"token": "\ufffd", "logprob": -1.0, "bytes": content["bytes"]}]
    completion = LogprobsFormatter(tokenizer).completion([entry], 1)
    assert completion["tokens"] == ["bytes:" + "".join(f"\\x{byte:02x}" for byte in content["bytes"])]


def test_tokens_are_shown_as_ids_on_request(tokenizer: TextTokenizer) -> None:
    entry = TokenLogprobs(3, [7, 9], [-0.5, -0.25], 2)
    formatter = LogprobsFormatter(tokenizer, as_token_ids=True)
    assert formatter.chat([entry], 0)["content"][0]["token"] == "token_id:7"
    assert formatter.completion([entry], 1) == {
        "text_offset": [3],
        "token_logprobs": [-0.5],
        "tokens": ["token_id:7"],
        "top_logprobs": [{"token_id:7": -0.5, "token_id:9": -0.25}],
    }
    (top,) = formatter.completion([entry], 1)["top_logprobs"]
    assert list(top) == ["token_id:7", "token_id:9"], "the actual token is the first one"


def test_minus_infinity_is_a_number(tokenizer: TextTokenizer) -> None:
    entry = TokenLogprobs(0, [7, 9], [float("-inf"), -0.25], 2)
    assert LogprobsFormatter(tokenizer).chat([entry], 1)["content"][0]["logprob"] == -9999.0
    assert LogprobsFormatter(tokenizer).completion([entry], 1)["token_logprobs"] == [-9999.0]


def test_prompt_logprobs_join_from_parts_that_overlap(tokenizer: TextTokenizer) -> None:
    collector = PromptLogprobsCollector([40, 41, 42, 43])
    collector.add(part(1, [[41, 50], [42, 51]]))
    assert not collector.complete
    collector.add(part(2, [[42, 51], [43, 52]]))
    assert collector.complete
    rows = collector.vllm(tokenizer)
    assert rows[0] is None
    assert [list(row or {}) for row in rows[1:]] == [["41", "50"], ["42", "51"], ["43", "52"]]
    assert rows[1] is not None
    assert rows[1]["41"] == {"logprob": -0.5, "rank": 1, "decoded_token": tokenizer.token_text(41)}
    assert rows[1]["50"]["rank"] == 1


def test_an_echo_has_an_entry_for_each_prompt_token(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("naïve 🚀")
    collector = PromptLogprobsCollector(token_ids)
    collector.add(part(1, [[token_id] for token_id in token_ids[1:]]))
    entries = list(collector.entries(tokenizer, "naïve 🚀"))
    assert [entry.token_ids[0] for entry in entries] == token_ids
    assert entries[0].logprobs == []
    assert [entry.text_offset for entry in entries] == [
        len(tokenizer.decode(token_ids[:place]).rstrip("\ufffd")) for place in range(len(token_ids))
    ]
    assert LogprobsFormatter(tokenizer).completion(entries, 0)["token_logprobs"][0] is None


@pytest.mark.parametrize("text", ["Hello world, this is", " two  spaces", "é", "Hello</s>"])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_tokens_of_an_echo_join_to_its_text(kind: str, text: str) -> None:
    """A model with a begin token: it is the tokenizer's, not the text's, unless the text has it too."""
    tokenizer = with_begin_token(kind)
    token_ids = tokenizer.encode(text)
    assert token_ids[0] == 0
    entries = list(PromptLogprobsCollector(token_ids).entries(tokenizer, text))
    shown = LogprobsFormatter(tokenizer).completion(entries, 1)
    assert len(entries) == len(token_ids)
    whole = [(offset, token) for offset, token in zip(shown["text_offset"], shown["tokens"], strict=True) if "bytes:" not in token]
    assert all(text.startswith(token, offset) for offset, token in whole)
    if text != "é":
        assert "".join(shown["tokens"]) == text


def with_begin_token(kind: str) -> TextTokenizer:
    library: Any
    if kind == "bytes":
        library = Tokenizer(
            models.BPE({"<s>": 0, **{sign: 1 + n for n, sign in enumerate(pre_tokenizers.ByteLevel.alphabet())}}, [])
        )
        library.pre_tokenizer, library.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    else:
        words = ["\u2581", "\u2581H", *"Helowrd,this</>"]
        vocab = {"<s>": 0, **{f"<0x{byte:02X}>": 1 + byte for byte in range(256)}}
        vocab |= {word: 300 + n for n, word in enumerate(words)}
        library = Tokenizer(models.BPE(vocab, [("\u2581", "H")], byte_fallback=True))
        library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(["<s>", "</s>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return TextTokenizer(TokenizerBundle(library.to_str(), None, "<s>", None, [], {}))
