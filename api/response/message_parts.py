"""Reasoning, content and tool calls of a chat's answer, as clients read them: deltas of streams, and the whole message."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, NamedTuple

from api.response.output_processor import ChoiceOutput
from api.text.reasoning import REASONING_FORMATS, ReasoningCounter, ReasoningSplitter
from api.tools.formats import FORMATS
from api.tools.parser import ToolDelta, ToolParser
from engine.protocol import AnswerOptions, FinishReason


class ChatDelta(NamedTuple):
    """`position`: of the choice's text, in characters, from which on it can be told."""

    position: int
    delta: dict[str, Any]


def has_parts(answer: AnswerOptions) -> bool:
    """Whether the text is more than content."""
    return answer.tool_format in FORMATS or answer.reasoning_format in REASONING_FORMATS


def marks(answer: AnswerOptions) -> tuple[str, ...]:
    """Texts that tell the parts apart. They may be special tokens."""
    tool_format, reasoning = FORMATS.get(answer.tool_format), REASONING_FORMATS.get(answer.reasoning_format)
    return (
        *(tool_format.marks if tool_format is not None else ()),
        *((reasoning.opening, reasoning.closing) if reasoning is not None else ()),
    )


def reasoning_counter(answer: AnswerOptions) -> ReasoningCounter | None:
    """For one choice; None: no reasoning is looked for."""
    reasoning = REASONING_FORMATS.get(answer.reasoning_format)
    return ReasoningCounter(reasoning, answer.reasoning_open) if reasoning is not None else None


class MessageReader:
    """Takes the text of one choice apart. `request_id`: what the ids of calls are made of."""

    def __init__(self, answer: AnswerOptions, request_id: str, index: int) -> None:
        self._format = FORMATS.get(answer.tool_format)
        self._parser = ToolParser(self._format, answer.tools, answer.one_call) if self._format is not None else None
        reasoning = REASONING_FORMATS.get(answer.reasoning_format)
        self._splitter = ReasoningSplitter(reasoning, answer.reasoning_open) if reasoning is not None else None
        self._hides_reasoning = answer.reasoning_hidden
        self._request_id = request_id
        self._index = index
        self._num_characters = 0  # read

    def read(self, output: ChoiceOutput, num_told: int = 0) -> list[ChatDelta]:
        """What the next output tells behind the first `num_told` characters, of which the last may be the text's end."""
        untold = max(0, num_told - self._num_characters)
        self._feed(output.text[:untold])
        deltas = self._feed(output.text[untold:])
        if output.finish_reason is not None:
            at_end = self._finish()
            if at_end and num_told <= self._num_characters:
                deltas.append(ChatDelta(self._num_characters + 1, at_end))
        return deltas

    def _feed(self, text: str) -> list[ChatDelta]:
        self._num_characters += len(text)
        deltas: list[ChatDelta] = []
        before = 0  # characters before the content
        if self._splitter is not None:
            if not self._splitter.is_done:
                reasoning, text = self._splitter.feed(text)
                if reasoning and not self._hides_reasoning:
                    deltas.append(ChatDelta(self._splitter.num_taken, _reasoning(reasoning)))
            before = self._splitter.num_taken
        if self._parser is None:
            return [*deltas, ChatDelta(self._num_characters, {"content": text})] if text else deltas
        for position, same in groupby(self._parser.feed(text), lambda delta: delta.position):
            deltas.append(ChatDelta(before + position, self._delta(same)))
        return deltas

    def _finish(self) -> dict[str, Any]:
        """What the text's end tells."""
        delta: dict[str, Any] = {}
        content = ""
        if self._splitter is not None and not self._splitter.is_done:
            reasoning, content = self._splitter.finish()
            delta = _reasoning(reasoning) if reasoning and not self._hides_reasoning else {}
        if self._parser is None:
            return {**delta, "content": content} if content else delta
        return {**delta, **self._delta([*self._parser.feed(content), *self._parser.finish()])}

    def _delta(self, deltas: Iterable[ToolDelta]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in deltas:
            if part.call < 0:
                delta["content"] = delta.get("content", "") + part.text
            else:
                delta.setdefault("tool_calls", []).append(self._call(part))
        return delta

    def _call(self, part: ToolDelta) -> dict[str, Any]:
        assert self._format is not None
        if part.name is None:
            return {"index": part.call, "function": {"arguments": part.text}}
        call_id = self._format.call_id(self._request_id, self._index, part.call)
        return {"index": part.call, "id": call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def finish_reason(self, reason: FinishReason | None) -> str:
        has_calls = self._parser is not None and self._parser.num_calls > 0
        return "tool_calls" if has_calls and reason is FinishReason.STOP else str(reason)


def _reasoning(text: str) -> dict[str, Any]:
    """vLLM's newest name, and the one that most clients know."""
    return {"reasoning": text, "reasoning_content": text}


def whole_message(reader: MessageReader, output: ChoiceOutput, prefix: str) -> dict[str, Any]:
    """The parts of a choice's whole output. `prefix`: content that stands before."""
    texts = {"content": [prefix], "reasoning": []}
    calls: list[dict[str, Any]] = []
    for _, delta in reader.read(output):
        for name, pieces in texts.items():
            pieces.append(delta.get(name, ""))
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                calls.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                calls[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    content, reasoning = ("".join(pieces) or None for pieces in texts.values())
    message: dict[str, Any] = {"content": content, "reasoning": reasoning}
    if reasoning is not None:
        message["reasoning_content"] = reasoning
    return {**message, "tool_calls": calls} if calls else message
