"""The look of Anthropic's messages: content blocks, streamed as events that open, fill and close each of them, and whole.

https://docs.anthropic.com/en/api/messages-streaming has the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw
from pydantic_core import from_json

from api.errors import ApiError
from api.http.anthropic_errors import anthropic_error
from api.response.answer_format import AnswerFormat
from api.response.generation import Generation
from api.response.message_parts import MessageReader, has_parts
from api.response.output_processor import ChoiceOutput
from api.response.stream_position import StreamPosition
from engine.config import ApiConfig
from engine.protocol import FinishReason

LONG_TEXT = 8192  # characters in which looking for the parts of a message takes some 10 milliseconds
_STARTS: dict[str, dict[str, Any]] = {"text": {"text": ""}, "thinking": {"thinking": "", "signature": ""}}

encode_json = msgspec.json.Encoder().encode


class _Block(msgspec.Struct):
    """A content block in the making. `pieces`: of its text, its thinking, or the JSON of a tool's input."""

    type: str
    id: str = ""  # of a tool call
    name: str = ""
    pieces: list[str] = []
    num_characters: int = 0

    def start(self) -> dict[str, Any]:
        if self.type == "tool_use":
            return {"type": self.type, "id": self.id, "name": self.name, "input": {}}
        return {"type": self.type, **_STARTS[self.type]}

    def delta(self, text: str) -> dict[str, Any]:
        if self.type == "tool_use":
            return {"type": "input_json_delta", "partial_json": text}
        return {"type": f"{self.type}_delta", self.type: text}

    def whole(self) -> dict[str, Any]:
        text = "".join(self.pieces)
        return {**self.start(), "input": _input(text)} if self.type == "tool_use" else {**self.start(), self.type: text}


def _input(text: str) -> dict[str, Any]:
    """A tool's input, as far as it was written when the answer was cut off."""
    try:
        value = from_json(text, allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


class _Change(msgspec.Struct):
    """What a delta does to the blocks: it opens one, or adds `text` to the last."""

    block: _Block
    opens: bool = False
    text: str = ""


class _Blocks:
    """The content blocks of an answer, of the deltas of a chat's message."""

    def __init__(self) -> None:
        self.blocks: list[_Block] = []

    def add(self, delta: dict[str, Any]) -> Iterator[_Change]:
        """More of the call that is open comes first: content behind a call ends it."""
        calls = delta.get("tool_calls", ())
        for call in calls:
            if "id" not in call:
                yield self._append(call["function"]["arguments"])
        for type, text in (("thinking", delta.get("reasoning")), ("text", delta.get("content"))):
            if text:
                yield from self._write(type, text)
        for call in calls:
            if "id" in call:
                yield self._open(_Block("tool_use", call["id"], call["function"]["name"]))

    def _write(self, type: str, text: str) -> Iterator[_Change]:
        if not self.blocks or self.blocks[-1].type != type:
            yield self._open(_Block(type))
        yield self._append(text)

    def _open(self, block: _Block) -> _Change:
        self.blocks.append(block)
        return _Change(block, opens=True)

    def _append(self, text: str) -> _Change:
        self.blocks[-1].pieces.append(text)
        return _Change(self.blocks[-1], text=text)


class MessagesFormat(AnswerFormat):
    """Events and whole answers of /v1/messages. Answers have one choice.

    The id of a stream's event says how many events have begun the message, opened a block or closed one, and how many characters of
    the open block were told. All of that follows from the text, however it comes in pieces: any API server counts the same.
    """

    @classmethod
    def position(cls, last: str | None, num_choices: int) -> StreamPosition:
        """Where a stream goes on whose client names the last event that it has; None: it has none. Raises BadRequest."""
        return StreamPosition.parse(last, num_choices) if last else StreamPosition(num_choices)

    def __init__(self, generation: Generation, config: ApiConfig, position: StreamPosition | int | None = None) -> None:
        """`position`: where a stream that can be continued stands; its events have ids, and what its client has is left out."""
        self._generation = generation
        self._answer = generation.task.answer
        self._reader = MessageReader(self._answer, generation.internal_ids[0], 0)
        self._blocks = _Blocks()
        self._num_opened = 0  # events that the ids count, told or not
        self._position = at = position if isinstance(position, StreamPosition) else None
        self._told = (0, 0) if at is None else (at.num_opened, at.num_characters(0))  # to the client, before
        self._last = ChoiceOutput(0)  # the output that ended the answer, once it has

    # Streamed

    def opening(self) -> bytes:
        return self._structure("message_start", message=self._message([], None, None, self._usage(0)))

    def chunks(self, output: ChoiceOutput) -> bytes:
        events = b""
        for _, delta in self._reader.read(output):
            for change in self._blocks.add(delta):
                events += self._opened() if change.opens else self._delta(change)
        if output.finish_reason is not None:
            self._last = output
            if self._blocks.blocks:
                events += self._structure("content_block_stop", index=len(self._blocks.blocks) - 1)
        return events

    def is_long(self, output: ChoiceOutput) -> bool:
        return len(output.text) > LONG_TEXT and has_parts(self._answer)

    def _opened(self) -> bytes:
        """The events around the beginning of the last block."""
        place = len(self._blocks.blocks) - 1
        closed = self._structure("content_block_stop", index=place - 1) if place else b""
        return closed + self._structure("content_block_start", index=place, content_block=self._blocks.blocks[place].start())

    def _structure(self, type: str, **members: Any) -> bytes:
        """An event that the ids count. Empty where the client has it."""
        self._num_opened += 1
        if self._position is not None:
            if self._num_opened <= self._told[0]:
                return b""
            self._position.num_opened = self._num_opened
            self._position.tell_part(0, 0)
        return self._event(type, **members)

    def _delta(self, change: _Change) -> bytes:
        """The event of text that the last block gains, as far as the client does not have it."""
        block, text = change.block, change.text
        block.num_characters += len(text)
        if self._position is not None:
            num_opened, num_told = self._told
            if self._num_opened < num_opened:
                return b""
            if self._num_opened == num_opened:
                text = text[max(0, num_told - (block.num_characters - len(text))) :]
            if not text:
                return b""
            self._position.tell_part(0, block.num_characters)
        return self._event("content_block_delta", index=len(self._blocks.blocks) - 1, delta=block.delta(text))

    def closing(self) -> bytes:
        position = self._position
        events = b""
        if position is None or not position.has_ended(0):
            if position is not None:
                position.tell_end(0)
            reason, sequence = self._stop()
            stop = {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}
            events = self._event("message_delta", delta=stop, usage=self._usage_at_end())
        if position is not None:
            if position.closed:
                return events
            position.closed = True
        return events + self._event("message_stop")

    def failure(self, error: ApiError) -> bytes:
        return b"event: error\ndata: " + anthropic_error(error.status, error.message, self._generation.external_id) + b"\n\n"

    def _event(self, type: str, **members: Any) -> bytes:
        head = b"" if self._position is None else self._position.event_id()
        return b"%bevent: %b\ndata: %b\n\n" % (head, type.encode(), encode_json({"type": type, **members}))

    # Whole

    def whole(self, choices: list[ChoiceOutput]) -> bytes:
        (self._last,) = choices
        for _, delta in self._reader.read(self._last):
            for _ in self._blocks.add(delta):
                pass
        content = [Raw(encode_json(block.whole())) for block in self._blocks.blocks]
        return encode_json(self._message(content, *self._stop(), self._usage_at_end()))

    def _message(self, content: list[Raw], reason: str | None, sequence: str | None, usage: dict[str, Any]) -> dict[str, Any]:
        return {
            "id": f"msg_{self._generation.external_id}",
            "type": "message",
            "role": "assistant",
            "model": self._generation.task.model.name,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "usage": usage,
        }

    def _stop(self) -> tuple[str, str | None]:
        """Why the answer ended, and the stop sequence that ended it."""
        last = self._last
        assert last.finish_reason is not None
        if last.finish_reason is FinishReason.LENGTH:
            return "max_tokens", None
        if last.finish_reason is not FinishReason.STOP:
            return str(last.finish_reason), None
        if isinstance(last.stop_reason, str):
            return "stop_sequence", last.stop_reason
        return ("tool_use" if self._reader.finish_reason(FinishReason.STOP) == "tool_calls" else "end_turn"), None

    def _usage_at_end(self) -> dict[str, Any]:
        usage = self._usage(self._generation.choices[0].num_tokens)
        if (num_thinking := self._generation.usage.reasoning_tokens) is not None:
            usage["output_tokens_details"] = {"thinking_tokens": num_thinking}
        return usage

    def _usage(self, num_tokens: int) -> dict[str, Any]:
        """Cached tokens of the prompt, where they are shown, are no input tokens: Anthropic counts them apart."""
        usage = self._generation.usage
        num_cached = usage.cached_tokens if self._answer.usage_details else 0
        return {
            "input_tokens": usage.prompt_tokens - num_cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": num_cached,
            "output_tokens": num_tokens,
        }
