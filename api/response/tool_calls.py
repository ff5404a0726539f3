"""The tool calls of a chat's answer, as OpenAI's API writes them: deltas of streams, and the message of a whole answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from api.response.output_processor import ChoiceOutput
from api.tools.formats import FORMATS
from api.tools.parser import ToolDelta, ToolParser
from engine.protocol import AnswerOptions, FinishReason


class ChatDelta(NamedTuple):
    """`position`: of the choice's text, in characters, from which on it can be told."""

    position: int
    delta: dict[str, Any]


class CallsOfChoice:
    """Finds the calls in the text of one choice. `request_id`: what the ids of calls are made of."""

    def __init__(self, answer: AnswerOptions, request_id: str, index: int) -> None:
        self._format = FORMATS[answer.tool_format]
        self._parser = ToolParser(self._format, answer.tools, answer.one_call)
        self._request_id = request_id
        self._index = index
        self._num_characters = 0  # read

    def read(self, output: ChoiceOutput, num_told: int = 0) -> Iterator[ChatDelta]:
        """What the next output tells behind the first `num_told` characters, of which the last may be the text's end."""
        untold = max(0, num_told - self._num_characters)
        self._num_characters += len(output.text)
        self._parser.feed(output.text[:untold])
        deltas = self._parser.feed(output.text[untold:])
        if output.finish_reason is not None:
            at_end = self._parser.finish()
            if num_told <= self._num_characters:
                deltas += at_end
        for position, same in groupby(deltas, lambda delta: delta.position):
            yield ChatDelta(position, self._delta(same))

    def _delta(self, deltas: Iterable[ToolDelta]) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for part in deltas:
            if part.call < 0:
                delta["content"] = delta.get("content", "") + part.text
            else:
                delta.setdefault("tool_calls", []).append(self._call(part))
        return delta

    def _call(self, part: ToolDelta) -> dict[str, Any]:
        if part.name is None:
            return {"index": part.call, "function": {"arguments": part.text}}
        call_id = self._format.call_id(self._request_id, self._index, part.call)
        return {"index": part.call, "id": call_id, "type": "function", "function": {"name": part.name, "arguments": ""}}

    def finish_reason(self, reason: FinishReason | None) -> str:
        return "tool_calls" if reason is FinishReason.STOP and self._parser.num_calls else str(reason)


def whole_message(calls: CallsOfChoice, output: ChoiceOutput, prefix: str) -> dict[str, Any]:
    """Content and calls of a choice's whole output. `prefix`: content that stands before."""
    content = prefix
    found: list[dict[str, Any]] = []
    for _, delta in calls.read(output):
        content += delta.get("content", "")
        for part in delta.get("tool_calls", ()):
            if "id" in part:
                found.append({"id": part["id"], "type": "function", "function": dict(part["function"])})
            else:
                found[part["index"]]["function"]["arguments"] += part["function"]["arguments"]
    return {"content": content or None, **({"tool_calls": found} if found else {})}
