"""The chaos command tells apart what can go wrong with an answer, and its faults do what they are named for."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.chaos.__main__ import kinds_of
from benchmarks.chaos.answers import Answer, CalmAnswer, ChoiceAnswer
from benchmarks.chaos.cases import Case, draw_cases
from benchmarks.chaos.client import Item
from benchmarks.chaos.faults import FAULTS
from benchmarks.chaos.redis import RedisServer, cut_from
from tests.redis_server import embedded_valkey

TOKENS = [11, 12, 13, 14, 15, 16, 17, 18, 19, 20]
UNDECIDED_AT = 6


def answered(token_ids: list[int], text: str | None = None, finish_reason: str | None = "length") -> Answer:
    text = "".join(f" {token}" for token in token_ids) if text is None else text
    usage = {"prompt_tokens": 4, "completion_tokens": len(token_ids)}
    return Answer({0: ChoiceAnswer(list(token_ids), text, finish_reason)}, usage)


def calm_answer() -> CalmAnswer:
    """Greedy; the second candidate is far away at each token but one."""
    answer = answered(TOKENS)
    for place, token in enumerate(TOKENS):
        second = -1.0005 if place == UNDECIDED_AT else -3.0
        answer.choices[0].logprobs.append((token, -1.0))
        answer.choices[0].top.append({token: -1.0, 99: second})
    return CalmAnswer(Case(0, "/v1/completions", {"temperature": 0.0, "seed": 1}), answer)


@pytest.mark.parametrize(
    ("got", "kind"),
    [
        (TOKENS, "same"),
        (TOKENS[:7], "lost"),
        (TOKENS[:3] + TOKENS[5:], "lost"),
        (TOKENS[:5] + TOKENS[3:], "repeated"),
        (TOKENS + TOKENS[-2:], "repeated"),
        ([*TOKENS[:3], 70, 71, 72, 73, 74, 75, 76], "changed"),
        ([*TOKENS[:UNDECIDED_AT], 70, 71, 72, 73], "excused"),
    ],
)
def test_an_answer_is_judged_by_its_tokens(got: list[int], kind: str) -> None:
    assert calm_answer().judge(answered(got), is_whole=True).kind == kind


def test_the_beginning_of_an_answer_is_enough_for_a_client_that_left() -> None:
    assert calm_answer().judge(answered(TOKENS[:3], finish_reason=None), is_whole=False).kind == "same"
    assert calm_answer().judge(answered(TOKENS[1:3], finish_reason=None), is_whole=False).kind != "same"


@pytest.mark.parametrize("wrong", [answered(TOKENS, text="other"), answered(TOKENS, finish_reason="stop")])
def test_text_and_end_must_be_equal_too(wrong: Answer) -> None:
    assert calm_answer().judge(wrong, is_whole=True).kind == "changed"


def test_an_answer_without_its_usage_or_a_choice_has_lost_it() -> None:
    without_usage = answered(TOKENS)
    without_usage.usage = None
    assert calm_answer().judge(without_usage, is_whole=True).kind == "lost"
    assert calm_answer().judge(Answer({}, {"prompt_tokens": 4, "completion_tokens": 0}), is_whole=True).kind == "lost"


def test_a_seed_draws_the_same_requests_each_time() -> None:
    cases = draw_cases(7, 40)
    assert cases == draw_cases(7, 40) != draw_cases(8, 40)
    items = [Item.draw(7, number, cases, ["stream", "unary"], 2) for number in range(20)]
    assert items == [Item.draw(7, number, cases, ["stream", "unary"], 2) for number in range(20)]


def test_kinds_are_chosen_by_name() -> None:
    assert kinds_of("none", list(FAULTS)) == []
    assert kinds_of("redis-wipe,kill-api", list(FAULTS)) == ["kill-api", "redis-wipe"]
    with pytest.raises(SystemExit, match="unknown: kill-api-2"):
        kinds_of("kill-api-2", list(FAULTS))


def test_a_file_is_cut_at_the_first_mark_of_the_second(tmp_path: Path) -> None:
    file = tmp_path / "appendonly.aof.1.incr.aof"
    whole = b"#TS:100\r\n*1\r\n$4\r\nPING\r\n#TS:101\r\n*1\r\n$4\r\nPING\r\n#TS:103\r\n*1\r\n$4\r\nPING\r\n"
    file.write_bytes(whole)
    assert cut_from(file, 104) == 0 and file.read_bytes() == whole
    assert cut_from(file, 102) == 103 and file.read_bytes() == whole[: whole.index(b"#TS:103")]
    assert cut_from(file, 100) == 100 and file.read_bytes() == b""


async def test_a_rollback_forgets_the_last_second_and_nothing_before(tmp_path: Path) -> None:
    server = RedisServer(embedded_valkey(), tmp_path / "redis")
    await server.start()
    try:
        await server.client.set("old", 1)
        kept_until = time.time() + 1.1
        while time.time() < kept_until:
            await server.client.set("new", time.time())  # a mark of each second
        await server.client.set("last", 1)
        assert 0.5 < await server.roll_back() < 1.5
        assert await server.client.exists("old") and not await server.client.exists("last")
    finally:
        await server.stop()
