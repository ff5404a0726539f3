"""The benchmark of long prompts: what it makes of the times of tokens, and a whole run against a server without a model."""

import asyncio
from pathlib import Path

from benchmarks import long_prompts
from benchmarks.long_prompts import Answer
from benchmarks.served import headrace, running


def test_gaps_count_where_they_end() -> None:
    answer = Answer(sent=1.0, tokens=[1.5, 2.0, 4.0, 4.5])
    assert answer.first_token == 0.5
    assert answer.gaps_within(2.0, 4.0) == [2.0]
    assert answer.gaps_within(0.0, 9.0) == [0.5, 2.0, 0.5]


def test_a_run_without_a_model(smollm2_gguf: Path, capsys) -> None:
    options = "--load-format null --data-parallel-size 1 --max-model-len 4200"
    with running(headrace(smollm2_gguf, options)) as server:
        found = asyncio.run(long_prompts.put_under(server.url, 2, 4000, 1, 0.0))
    assert len(found.long) == 2
    assert all(1 <= len(answer.tokens) <= long_prompts.LONG_OUTPUT for answer in found.long), (
        "tokens that come together are one event"
    )
    long_prompts.show(found, 4000)
    assert "tokens of long prompts a second" in capsys.readouterr().out
