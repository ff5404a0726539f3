"""Whether an answer may begin with reasoning, and that a form of the output holds behind it."""

from __future__ import annotations

import pytest

from api.request.reasoning import Thought, grammar_behind, thought_of
from api.request.tool_grammar import calls_or_answer
from tests.api.request.test_tools import matches, use_of

YES = 'start: "yes" | "no"'


@pytest.mark.parametrize(
    ("format", "prompt", "thought"),
    [
        ("", "<think>", Thought()),
        ("none", "<think>", Thought()),
        ("think", "<|im_start|>assistant\n", Thought("think")),
        ("think", "<|im_start|>assistant\n<think>\n", Thought("think", is_open=True)),
        ("think", "<|im_start|>assistant\n<think>\n\n</think>\n\n", Thought("think", is_over=True)),
    ],
)
def test_the_prompt_tells_where_the_answer_begins(format: str, prompt: str, thought: Thought) -> None:
    assert thought_of(format, prompt) == thought


def test_a_form_holds_behind_reasoning() -> None:
    inside, before, over = Thought("think", is_open=True), Thought("think"), Thought("think", is_over=True)
    grammar = grammar_behind(inside, YES, {})
    assert matches(grammar, "Hm < </thin so.\n</think>\n\nyes") and matches(grammar, "</think>no")
    assert not matches(grammar, "yes") and not matches(grammar, "Hm</think>maybe")
    grammar = grammar_behind(before, YES, {})
    assert matches(grammar, "<think>Hm</think>yes") and matches(grammar, "no")
    assert not matches(grammar, "Hm</think>yes")
    assert grammar_behind(over, YES, {}) == YES
    assert grammar_behind(inside, "", {}) == ""
    assert "<[7]>" in grammar_behind(inside, YES, {"</think>": 7})


def test_calls_and_answers_hold_behind_reasoning() -> None:
    calls = use_of("hermes", tool_choice="required").grammar
    grammar = grammar_behind(Thought("think", is_open=True), calls_or_answer(calls, YES), {})
    call = '<tool_call>\n{"name": "stop", "arguments": {}}\n</tool_call>'
    assert matches(grammar, f"Hm</think>\n\n{call}") and matches(grammar, "Hm</think>no")
    assert not matches(grammar, call) and not matches(grammar, "Hm</think>maybe")
