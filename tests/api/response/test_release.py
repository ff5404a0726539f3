"""What a request leaves behind: nothing that only the garbage collector finds, which would walk hundreds of requests at once."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from api.preparation.task import Task
from api.request.prompts import Prompt
from api.response.answer import WholeAnswer, whole_body
from api.response.chat_format import ChatFormat
from api.response.completion_format import CompletionFormat
from api.response.generation import Generation
from api.response.pending_output import OutputBudget
from api.response.sse import EventSink, EventStream
from api.text.tokenizer import TextTokenizer
from engine.config import ApiConfig
from engine.protocol import AnswerOptions, FinishReason
from gpu.plan import SamplingParams
from tests.api.response.test_chat_format import ChatModel
from tests.api.response.test_generation import Recorder, end


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def made(tokenizer: TextTokenizer) -> Generation:
    options = AnswerOptions(stop=["nothing"], role="assistant", tool_format="hermes")
    task = Task("/", ChatModel(tokenizer), [Prompt([5])] * 2, [SamplingParams(n=2)] * 2, options, stream=True)  # type: ignore[arg-type]
    return Generation(task, "mine", ["mine-0", "mine-1"], 1.0, "tenant", Recorder())


def finish(generation: Generation) -> None:
    for run in list(generation.runs):
        for choice in range(2):
            run.take_token(choice, 7, None)
            run.take_end(choice, end(choice=choice, reason=FinishReason.STOP))


@pytest.mark.parametrize("format", [ChatFormat, CompletionFormat])
@pytest.mark.parametrize("ends", [True, False])
async def test_a_stream_that_ended_or_was_left(tokenizer: TextTokenizer, format: type[ChatFormat], ends: bool) -> None:
    generation = made(tokenizer)
    sink = generation.sink = EventSink(format(generation, ApiConfig()), OutputBudget(1 << 20))
    stream = EventStream(generation, sink, {}, 0.0)
    generation.begin([])
    if ends:
        finish(generation)
    left = [weakref.ref(each) for each in (generation, sink, *generation.runs, *generation.choices)]
    stream.leave()
    stream.leave()
    del generation, sink, stream
    assert [each() for each in left if each() is not None] == []


async def test_a_whole_answer(tokenizer: TextTokenizer) -> None:
    generation = made(tokenizer)
    whole = generation.sink = WholeAnswer(4)
    generation.begin([])
    finish(generation)
    generation.close()
    assert b'"finish_reason":"stop"' in await whole_body(generation, await whole.choices(), ChatFormat(generation, ApiConfig()))
    left = [weakref.ref(each) for each in (generation, whole, *generation.runs, *generation.choices)]
    generation.release()
    del generation, whole
    assert [each() for each in left if each() is not None] == []
