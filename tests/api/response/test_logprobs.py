"""Logprobs in both formats."""

from __future__ import annotations

import numpy as np

from api.response.logprobs import LogprobsFormatter, PromptLogprobsCollector
from api.response.output_processor import TokenLogprobs
from api.text.tokenizer import TextTokenizer
from engine.protocol import OutputPromptLogprobs, encode_column


def part(position: int, rows: list[list[int]]) -> OutputPromptLogprobs:
    values = [[-0.5 - column for column in range(len(row))] for row in rows]
    return OutputPromptLogprobs(
        1, position, encode_column(rows), encode_column(values, np.float32), encode_column(range(1, len(rows) + 1))
    )


def test_half_a_character_has_bytes(tokenizer: TextTokenizer) -> None:
    first, *_ = tokenizer.encode("🚀")
    entry = TokenLogprobs(0, [first, first], [-1.0, -1.0], 1)
    (content,) = LogprobsFormatter(tokenizer).chat([entry], 1)["content"]
    assert content["token"] == "\ufffd"
    assert bytes(content["bytes"]) == "🚀".encode()[: len(content["bytes"])]
    assert content["top_logprobs"] == [{"token": "\ufffd", "logprob": -1.0, "bytes": content["bytes"]}]
    completion = LogprobsFormatter(tokenizer).completion([entry], 1)
    assert completion["tokens"] == ["bytes:" + "".join(f"\\x{byte:02x}" for byte in content["bytes"])]


def test_tokens_as_ids(tokenizer: TextTokenizer) -> None:
    entry = TokenLogprobs(3, [7, 9], [-0.5, -0.25], 2)
    formatter = LogprobsFormatter(tokenizer, as_token_ids=True)
    assert formatter.chat([entry], 0)["content"][0]["token"] == "token_id:7"
    assert formatter.completion([entry], 1) == {
        "text_offset": [3],
        "token_logprobs": [-0.5],
        "tokens": ["token_id:7"],
        "top_logprobs": [{"token_id:9": -0.25, "token_id:7": -0.5}],
    }


def test_minus_infinity_is_a_number(tokenizer: TextTokenizer) -> None:
    entry = TokenLogprobs(0, [7, 9], [float("-inf"), -0.25], 2)
    assert LogprobsFormatter(tokenizer).chat([entry], 1)["content"][0]["logprob"] == -9999.0
    assert LogprobsFormatter(tokenizer).completion([entry], 1)["token_logprobs"] == [-9999.0]


def test_prompt_logprobs_from_parts_that_overlap(tokenizer: TextTokenizer) -> None:
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


def test_entries_of_an_echo(tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("naïve 🚀")
    collector = PromptLogprobsCollector(token_ids)
    collector.add(part(1, [[token_id] for token_id in token_ids[1:]]))
    entries = list(collector.entries(tokenizer))
    assert [entry.token_ids[0] for entry in entries] == token_ids
    assert entries[0].logprobs == []
    assert [entry.text_offset for entry in entries] == [
        len(tokenizer.decode(token_ids[:place]).rstrip("\ufffd")) for place in range(len(token_ids))
    ]
    assert LogprobsFormatter(tokenizer).completion(entries, 0)["token_logprobs"][0] is None
