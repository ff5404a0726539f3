"""Chunks of chat with tool calls: their ids let any API server go on, behind each event, without a loss or a repetition."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.preparation.task import Task
from api.request.prompts import Prompt
from api.response.chat_format import ChatFormat
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput
from api.response.stream_position import StreamPosition
from api.text.tokenizer import TextTokenizer
from engine.config import ApiConfig
from engine.protocol import AnswerOptions, FinishReason
from gpu.plan import SamplingParams
from tests.api.response.test_generation import FakeModel, Recorder, end

TEXT = (
    'I look.\n<tool_call>\n{"name": "f", "arguments": {"city": "Oslo"}}\n</tool_call>\n<tool_call>{"arguments": {}, "name": "g"} <'
)
CALLS = [("f", '{"city": "Oslo"}'), ("g", "{}")]
Event = tuple[str, dict[str, Any]]  # id, item of `choices`


class ChatModel(FakeModel):
    fingerprint = "0"


class Server:
    """What one API server makes of the tokens of TEXT."""

    def __init__(self, tokenizer: TextTokenizer, **answer: Any) -> None:
        options = AnswerOptions(role="assistant", tool_format="hermes", tools={"f": {}, "g": {}}, **answer)
        task = Task("/", ChatModel(tokenizer), [Prompt([5])], [SamplingParams(max_tokens=99)], options)  # type: ignore[arg-type]
        told = Recorder()
        self.generation = Generation(task, "mine", ["mine-1"], 1.0, "tenant", told)
        self.generation.sink = told
        self.generation.begin([])
        (run,) = self.generation.runs
        for token_id in tokenizer.encode(TEXT, add_special_tokens=False):
            run.take_token(0, token_id, None)
        run.take_end(0, end(reason=FinishReason.STOP))
        self.outputs = told.outputs

    def format(self, last_id: str = "") -> ChatFormat:
        position = StreamPosition.parse(last_id, 1) if last_id else StreamPosition(1)
        return ChatFormat(self.generation, ApiConfig(), position)

    def events(self, last_id: str = "", merged: bool = False) -> list[Event]:
        """Of a stream behind an id. `merged`: the client was so slow that all is one output."""
        format = self.format(last_id)
        written = format.opening() + b"".join(map(format.chunks, [self.whole] if merged else self.outputs))
        lines = [event.split("\n") for event in written.decode().split("\n\n") if event]
        return [(id.removeprefix("id: "), json.loads(data.removeprefix("data: "))["choices"][0]) for id, data in lines]

    @property
    def whole(self) -> ChoiceOutput:
        text = "".join(output.text for output in self.outputs)
        token_ids = [token_id for output in self.outputs for token_id in output.token_ids]
        return ChoiceOutput(0, text, token_ids, (), FinishReason.STOP)


def summed(events: list[Event]) -> tuple[str, list[tuple[str, str]], list[str], list[int]]:
    """Content, calls, ends and token ids."""
    content, calls, ends, token_ids = "", [], [], []
    for _, item in events:
        content += item["delta"].get("content", "")
        token_ids += item.get("token_ids", [])
        for part in item["delta"].get("tool_calls", []):
            if "id" in part:
                calls.append([part["function"]["name"], ""])
            else:
                calls[part["index"]][1] += part["function"]["arguments"]
        ends += [item["finish_reason"]] if item["finish_reason"] else []
    return content, [(name, arguments) for name, arguments in calls], ends, token_ids


@pytest.mark.parametrize("token_ids", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_every_event_is_a_place_to_go_on_from(tokenizer: TextTokenizer, merged: bool, token_ids: bool) -> None:
    server = Server(tokenizer, token_ids=token_ids)
    events = server.events()
    shown = list(server.whole.token_ids) if token_ids else []
    assert summed(events) == ("I look. <", CALLS, ["tool_calls"], shown)
    assert summed(server.events(merged=True)) == summed(events)
    assert len({id for id, _ in events}) == len(events)
    for count in range(1, len(events) + 1):
        rest = Server(tokenizer, token_ids=token_ids).events(events[count - 1][0], merged)
        assert summed(events[:count] + rest) == summed(events)


def test_a_whole_answer_is_the_streams_sum(tokenizer: TextTokenizer) -> None:
    server = Server(tokenizer)
    (choice,) = json.loads(server.format().whole([server.whole]))["choices"]
    message = choice["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"]]
    assert (message["content"], calls, [choice["finish_reason"]], []) == summed(server.events())
    told = [part["id"] for _, item in server.events() for part in item["delta"].get("tool_calls", []) if "id" in part]
    assert [call["id"] for call in message["tool_calls"]] == told
