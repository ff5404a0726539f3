"""How a generation becomes an HTTP answer, streamed or whole. What it looks like its `AnswerFormat` says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from api.response.chunk_format import AnswerFormat, WholeChoice
from api.response.generation import Generation
from api.response.shortcut import shorten
from api.response.sse import GenerationStream

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what access logs and metrics show


async def answer(
    request: Request, generation: Generation, format: AnswerFormat, headers: dict[str, str], keep_alive: float
) -> Response:
    """The response to an enqueued request; from here on the generation closes by itself."""
    if generation.task.stream:
        return GenerationStream(
            _frames(generation, format), generation, headers, keep_alive, on_first=partial(shorten, generation, format)
        )
    try:
        choices = await _unless_disconnected(request, generation)
        if choices is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        body = format.whole(choices)
    finally:
        await generation.close()
    return Response(body, media_type="application/json", headers=headers)


async def _frames(generation: Generation, format: AnswerFormat) -> AsyncGenerator[bytes]:
    """All chunks of one update in one piece, which is one write."""
    opened = False
    async with aclosing(generation.outputs()) as updates:
        async for outputs in updates:
            chunks = [] if opened else [*format.opening()]  # not before: an early failure is to be the first event
            opened = True
            for output in outputs:
                chunks += format.chunks(output)
            if chunks:
                yield chunks[0] if len(chunks) == 1 else b"".join(chunks)
    if chunks := list(format.closing()):
        yield b"".join(chunks)


async def _unless_disconnected(request: Request, generation: Generation) -> list[WholeChoice] | None:
    """All choices whole, or None when the client went away first."""
    work = asyncio.create_task(_collect(generation))
    gone = asyncio.create_task(_disconnect(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else None
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _collect(generation: Generation) -> list[WholeChoice]:
    choices = [WholeChoice() for _ in range(generation.task.num_choices)]
    texts: list[list[str]] = [[] for _ in choices]
    async with aclosing(generation.outputs()) as updates:
        async for outputs in updates:
            for output in outputs:
                choice = choices[output.index]
                texts[output.index].append(output.text)
                choice.token_ids += output.token_ids
                choice.logprobs += output.logprobs
                if output.finish_reason is not None:
                    choice.finish_reason, choice.stop_reason = output.finish_reason, output.stop_reason
    for choice, parts in zip(choices, texts, strict=True):
        choice.text = "".join(parts)
    return choices


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
