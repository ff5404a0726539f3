"""A whole answer: the outputs of each choice put together, and the response that carries them."""

from __future__ import annotations

import asyncio

from starlette.responses import Response

from api.errors import ApiError
from api.http.json_route import CLIENT_CLOSED_REQUEST
from api.http.response_writer import ResponseWriter
from api.response.chunk_format import AnswerFormat
from api.response.generation import Generation
from api.response.output_processor import ChoiceOutput, CollectedOutput


class WholeAnswer:
    """A sink that puts the outputs of each choice together."""

    def __init__(self, num_choices: int) -> None:
        self._collected = [CollectedOutput(index) for index in range(num_choices)]
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


async def whole_response(
    generation: Generation, answer: WholeAnswer, format: AnswerFormat, writer: ResponseWriter, headers: dict[str, str]
) -> Response:
    """The response of a generation whose sink is `answer`. It closes the generation whatever happens. Raises GenerationError."""
    try:
        writer.when_gone(generation.abort)
        choices = await answer.choices()
    finally:
        generation.close()
    if writer.gone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return Response(format.whole(choices), media_type="application/json", headers=headers)
