"""The reasoning of a chat's answer: whether there may be some, and that a form of the output holds behind it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

from api.errors import BadRequest
from api.text.reasoning import REASONING_FORMATS
from engine.protocol import ThinkingBudget

INT32_MAX = 2**31 - 1


@dataclass(frozen=True)
class Thought:
    """`format`: name of the marks between which an answer may have reasoning; "": it has none. `is_open`: it begins inside."""

    format: str = ""
    is_open: bool = False
    is_over: bool = False  # the prompt ends with empty reasoning


def thought_of(format: str, prompt: str) -> Thought:
    """`format`: that the model writes. `prompt`: the text that the answer follows."""
    marks = REASONING_FORMATS.get(format)
    if marks is None:
        return Thought()
    end = prompt.rstrip()
    return Thought(format, end.endswith(marks.opening), end.endswith(marks.closing))


def marks_are_tokens(format: str, token_ids: Mapping[str, int]) -> bool:
    """Whether the marks of a reasoning format are tokens of their own, so that the engine can tell them."""
    marks = REASONING_FORMATS.get(format)
    return marks is not None and marks.opening in token_ids and marks.closing in token_ids


def thinking_budget(budget: int | None, thought: Thought, token_ids: Mapping[str, int]) -> ThinkingBudget | None:
    """For an answer whose reasoning may have `budget` tokens; None and -1: any number. `token_ids`: of texts that are tokens by
    themselves. Raises BadRequest."""
    if budget is None or budget == -1 or thought.is_over:
        return None
    if not 0 <= budget <= INT32_MAX:
        raise BadRequest(f"thinking_token_budget must be -1 or from 0 to {INT32_MAX}, got {budget}.", param="thinking_token_budget")
    if not marks_are_tokens(thought.format, token_ids):
        message = "thinking_token_budget needs a model that marks its reasoning with tokens made for that; this one does not."
        raise BadRequest(message, param="thinking_token_budget")
    marks = REASONING_FORMATS[thought.format]
    return ThinkingBudget(budget, token_ids[marks.opening], token_ids[marks.closing], thought.is_open)


def grammar_behind(thought: Thought, grammar: str, token_ids: Mapping[str, int]) -> str:
    """A grammar for outputs that match `grammar` behind their reasoning. `token_ids`: of texts that are tokens of their own."""
    if not grammar or not thought.format or thought.is_over:
        return grammar
    marks = REASONING_FORMATS[thought.format]

    def mark(text: str) -> str:
        return f"<[{token_ids[text]}]>" if text in token_ids else json.dumps(text)

    lines = [
        "start: thought @answer" if thought.is_open else f"start: ({mark(marks.opening)} thought)? @answer",
        'thought: text_and_closing ("\\n\\n" | "\\n")?',
        f"text_and_closing{'' if marks.closing in token_ids else '[lazy]'}: TEXT {mark(marks.closing)}",
        r"TEXT: /(.|\n)*/",
    ]
    first, *others = json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(lines)}, {**first, "name": "answer"}, *others]})
