"""A whole answer: the outputs of each choice put together, and the response that carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from api.errors import ApiError
from api.http.json_route import CLIENT_CLOSED_REQUEST
from api.http.response_writer import ResponseWriter
from api.response.answer_format import AnswerFormat
from api.response.chunk_format import LONG_TOKENS
from api.response.generation import Generation
from api.response.message_parts import has_parts
from api.response.output_processor import ChoiceOutput, CollectedOutput

TOKENS_OF_PARTS = 6  # tokens whose JSON takes as long as looking for the parts of a message in one


class WholeAnswer:
    """A sink that puts the outputs of each choice together."""

    def __init__(self, num_choices: int, keeps_pieces: bool = False) -> None:
        self._collected = [CollectedOutput(index, keeps_pieces) for index in range(num_choices)]
        self._error: ApiError | None = None
        self._ended = asyncio.Event()

    def put(self, output: ChoiceOutput) -> None:
        self._collected[output.index].add(output)

    def end(self, error: ApiError | None = None) -> None:
        self._error = error
        self._ended.set()

    async def choices(self) -> list[ChoiceOutput]:
        """All of them, once they have ended. Raises the error that ended them."""
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        return [collected.output() for collected in self._collected]


class Unheard:
    """A sink for a request that goes on without a client: nothing of it is written. `close` closes the generation."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def put(self, output: ChoiceOutput) -> None:
        return

    def end(self, error: ApiError | None = None) -> None:
        asyncio.get_running_loop().call_soon(self._close)


async def whole_response(
    generation: Generation, answer: WholeAnswer, format: AnswerFormat, writer: ResponseWriter, headers: dict[str, str]
) -> Response:
    """The response of a generation whose sink is `answer`. It always closes the generation. Raises GenerationError."""
    try:
        writer.when_gone(generation.abort)
        choices = await answer.choices()
    finally:
        generation.close()
    if writer.gone:
        generation.release()
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    body = await whole_body(generation, choices, format)
    generation.release()
    return Response(body, media_type="application/json", headers=headers)


async def whole_body(generation: Generation, choices: list[ChoiceOutput], format: AnswerFormat) -> bytes:
    """JSON, made on a thread where that takes long."""
    return await run_in_threadpool(format.whole, choices) if _is_long(generation, format) else format.whole(choices)


def _is_long(generation: Generation, format: AnswerFormat) -> bool:
    """Whether to write the answer would keep the event loop for more than some milliseconds."""
    usage, task = generation.usage, generation.task
    wanted = [task.sampling[0].logprobs or 0, task.sampling[0].prompt_logprobs or 0]
    num_logprobs = task.model.limits.vocab_size if -1 in wanted else max(wanted)
    num_items = (usage.completion_tokens + usage.prompt_tokens * task.n) * (1 + num_logprobs)
    parts_count = has_parts(task.answer) or format.tells_each_output
    return num_items + (usage.completion_tokens * TOKENS_OF_PARTS if parts_count else 0) > LONG_TOKENS
