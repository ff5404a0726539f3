"""Output that waits for slow clients: whole and in order for each choice, in bounded parts, and bounded over all clients."""

from __future__ import annotations

import pytest

from api.response import pending_output
from api.response.output_processor import ChoiceOutput, TokenLogprobs
from api.response.pending_output import OutputBudget, PendingOutput
from engine.protocol import FinishReason


def never(num_bytes: int) -> None:
    pytest.fail("dropped")


def test_parts_give_each_choice_whole_and_none_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pending_output, "PART_BYTES", 2000)
    pending = PendingOutput(OutputBudget(1 << 20), never)
    for number in range(200):
        pending.add(ChoiceOutput(number % 2, f"{number} ", [number]))
    pending.add(ChoiceOutput(0, "", (), finish_reason=FinishReason.STOP))
    parts: dict[int, list[ChoiceOutput]] = {0: [], 1: []}
    while pending.parts:
        part = pending.pop()
        parts[part.index].append(part)
    for choice in (0, 1):
        assert [token for part in parts[choice] for token in part.token_ids] == list(range(choice, 200, 2))
        assert len(parts[choice]) > 5
    assert [part.finish_reason for part in parts[0]] == [None] * (len(parts[0]) - 1) + [FinishReason.STOP]


def test_beyond_the_budget_the_client_with_most_is_dropped() -> None:
    budget, dropped = OutputBudget(100_000), list[str]()

    def client(name: str) -> PendingOutput:
        def drop(num_bytes: int) -> None:
            assert num_bytes > 50_000
            dropped.append(name)
            pending.clear()

        pending = PendingOutput(budget, drop)
        return pending

    greedy, modest = client("greedy"), client("modest")
    logprobs = [TokenLogprobs(0, list(range(21)), [0.0] * 21, 1)]
    for _ in range(20):
        modest.add(ChoiceOutput(0, "x", [1]))
    while not dropped:
        greedy.add(ChoiceOutput(0, "x", [1], logprobs))
    assert dropped == ["greedy"] and not greedy.parts and modest.parts
    for _ in range(200):
        greedy.add(ChoiceOutput(0, "x", [1]))
        greedy.pop()
    assert dropped == ["greedy"]
