"""Large bodies in reader processes: the same results and the same errors as on a thread, and nothing that outlives its request."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any, NoReturn

import msgspec
import pytest
import pytest_asyncio
from pydantic import TypeAdapter

from api.errors import ApiError, BadRequest, InvalidRequest, ServiceUnavailable
from api.model_files import ServedModel, make_model_files
from api.preparation import readers as readers_module
from api.preparation.chat import prepare_chat
from api.preparation.completion import prepare_completion
from api.preparation.parcels import HEADER_BYTES, DropBody, ReadBody, Work, pack, unpack
from api.preparation.reader import Reader
from api.preparation.readers import Readers
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.preparation.tokenization import detokenized, tokenized
from api.request.sampling_params import ModelLimits
from api.request.schemas import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeChatRequest,
    TokenizeCompletionRequest,
)
from engine.protocol import TokenizerBundle

pytestmark = pytest.mark.asyncio(loop_scope="module")
RULES = RequestRules(template_defaults={"tone": "dry"})
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "So it"}]


@pytest.fixture(scope="module")
def model(smollm2_bundle: TokenizerBundle) -> ServedModel:
    files = make_model_files("m", "hash", smollm2_bundle)
    return ServedModel("m", "m", "canonical", "0", "f", ModelLimits(2048, 49152, 20), False, files)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def readers() -> AsyncIterator[Readers]:
    readers = Readers(1)
    yield readers
    await readers.close()


def seconds(body: Any, model: ServedModel, rules: RequestRules) -> str:
    time.sleep(30)  # longer than anybody waits
    return "slept"


def process_id(body: Any, model: ServedModel, rules: RequestRules) -> int:
    return os.getpid()


def panics(body: Any, model: ServedModel, rules: RequestRules) -> NoReturn:
    raise KeyboardInterrupt("as a panic of the tokenizers' library is no Exception")


async def worked(readers: Readers, model: ServedModel, schema: Any, body: dict[str, Any], work: Any) -> tuple[Any, Any]:
    """The body's head, and what the work made of the body."""
    with await readers.read(schema, json.dumps(body).encode()) as held:
        return held.head, await held.work(work, held.head, model, RULES)


def comparable(task: Task) -> Task:
    return msgspec.structs.replace(task, prompts=[(list(prompt.token_ids), prompt.text) for prompt in task.prompts])


@pytest.mark.parametrize(
    ("schema", "work", "body"),
    [
        (CompletionRequest, prepare_completion, {"prompt": ["a b c", "d"], "seed": 3, "echo": True, "logit_bias": {"5": 1}}),
        (
            CompletionRequest,
            prepare_completion,
            {"prompt": [[5, 6], [7]], "seed": 3, "stop": "x", "stream": True, "user": "u" * 999},
        ),
        (ChatCompletionRequest, prepare_chat, {"messages": MESSAGES[:1], "seed": 4, "return_prompt_text": True}),
        (
            ChatCompletionRequest,
            prepare_chat,
            {"messages": MESSAGES, "seed": 4, "echo": True, "add_generation_prompt": False, "continue_final_message": True},
        ),
        (TokenizeChatRequest | TokenizeCompletionRequest, tokenized, {"prompt": "a b", "return_token_strs": True}),
        (TokenizeChatRequest | TokenizeCompletionRequest, tokenized, {"messages": MESSAGES}),
        (DetokenizeRequest, detokenized, {"tokens": [5, 6, 7]}),
    ],
)
async def test_a_reader_process_gives_the_same_results_as_this_process(
    readers: Readers, model: ServedModel, schema: Any, work: Any, body: dict[str, Any]
) -> None:
    head, result = await worked(readers, model, schema, body, work)
    own = TypeAdapter(schema).validate_python(body)
    expected = work(own, model, RULES)
    if isinstance(expected, Task):
        assert result.model is model
        result, expected = comparable(result), comparable(expected)
    assert result == expected
    assert not any(isinstance(value, list | dict) or (isinstance(value, str) and len(value) > 256) for _, value in head)
    for field in ("stream", "echo", "add_generation_prompt", "seed"):
        assert getattr(head, field, None) == getattr(own, field, None)


async def test_errors_of_a_reader_process_come_back_unchanged(readers: Readers, model: ServedModel) -> None:
    with pytest.raises(InvalidRequest) as invalid:
        await readers.read(CompletionRequest, b'{"prompt": "x", "n": "2"}')
    assert (invalid.value.status, invalid.value.param) == (400, "body.n")
    assert invalid.value.message.startswith("1 validation error:\n  body.n: Input should be a valid integer")
    with pytest.raises(BadRequest, match="at most 16384") as bad:
        await worked(readers, model, CompletionRequest, {"prompt": "x", "n": 16385}, prepare_completion)
    assert (bad.value.status, bad.value.param) == (400, "n")
    with pytest.raises(ApiError, match=r"^Internal server error\.$") as fault:
        await worked(readers, model, CompletionRequest, {"prompt": "x"}, panics)
    assert fault.value.status == 500
    assert (await worked(readers, model, CompletionRequest, {"prompt": "x"}, process_id))[1] != os.getpid()


async def test_a_process_that_ends_is_replaced(readers: Readers, model: ServedModel) -> None:
    with await readers.read(CompletionRequest, b'{"prompt": "x"}') as held:
        (_, first) = await worked(readers, model, CompletionRequest, {"prompt": "x"}, process_id)
        os.kill(first, signal.SIGKILL)
        with pytest.raises(ServiceUnavailable, match="ended") as gone:
            await held.work(process_id, held.head, model, RULES)
        assert gone.value.headers == {"Retry-After": "1"}
    (_, second) = await worked(readers, model, CompletionRequest, {"prompt": "x"}, process_id)
    assert second != first


async def test_a_request_that_takes_too_long_ends_alone(
    readers: Readers, model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worked(readers, model, CompletionRequest, {"prompt": "x"}, process_id)
    monkeypatch.setattr(readers_module, "LONGEST_SECONDS", 0.2)
    with pytest.raises(BadRequest, match="could not be read within"):
        await worked(readers, model, CompletionRequest, {"prompt": "x"}, seconds)
    monkeypatch.undo()
    assert (await worked(readers, model, DetokenizeRequest, {"tokens": [5]}, detokenized))[1]


async def test_an_asker_that_goes_away_leaves_the_others_in_order(readers: Readers, model: ServedModel) -> None:
    asked = [asyncio.create_task(worked(readers, model, DetokenizeRequest, {"tokens": [5] * n}, detokenized)) for n in range(1, 9)]
    await asyncio.sleep(0)
    for task in asked[::2]:
        task.cancel()
    done = await asyncio.gather(*asked, return_exceptions=True)
    assert [isinstance(result, asyncio.CancelledError) for result in done] == [True, False] * 4
    for n, result in zip(range(2, 9, 2), done[1::2], strict=True):
        assert not isinstance(result, BaseException)
        assert json.loads(result[1]) == {"prompt": model.tokenizer.decode([5] * n)}


async def test_a_body_is_kept_until_it_was_worked_on_or_dropped(model: ServedModel) -> None:
    raw = io.BytesIO(b'{"tokens": [5]}' * 3)
    reader = Reader(raw)

    def ask(command: Any) -> Any:
        return unpack(reader.answer(pack(command, lambda value: None)[HEADER_BYTES:])[HEADER_BYTES:], lambda name: None)

    assert [ask(ReadBody(number, DetokenizeRequest, 15))[0] for number in (1, 2, 3)] == [True] * 3
    ask(DropBody(1))
    ask(Work(2, len, ([],)))
    ask(Work(3, panics, (None, None, None)))
    assert reader._bodies == {}
