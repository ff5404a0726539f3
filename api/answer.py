"""How a generation becomes an HTTP answer, streamed or whole. The endpoints say what it looks like (`AnswerFormat`)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from api.choice import ChoiceOutput, TokenLogprobs
from api.generation import Generation
from api.schemas import SamplingFields
from api.sse import GenerationStream
from engine.config import ApiConfig
from engine.protocol import FinishReason

CLIENT_CLOSED_REQUEST = 499  # nobody reads it; it is what access logs and metrics show


@dataclass(slots=True)
class WholeChoice:
    """All outputs of one choice, put together."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


@dataclass(frozen=True)
class UsageOptions:
    """`at_end`: a last chunk with the usage; `continuous`: usage in every chunk; `details`: cached tokens too."""

    at_end: bool = False
    continuous: bool = False
    details: bool = False

    @classmethod
    def of(cls, request: SamplingFields, config: ApiConfig) -> UsageOptions:
        details = config.enable_prompt_tokens_details
        if config.enable_force_include_usage:
            return cls(True, True, details)
        options = request.stream_options
        if options is None or not options.include_usage:
            return cls(details=details)
        return cls(True, options.continuous_usage_stats, details)


class AnswerFormat(Protocol):
    """The look of one endpoint's answer."""

    def opening(self) -> Iterator[bytes]:
        """Chunks before the first output."""
        ...

    def chunks(self, output: ChoiceOutput) -> Iterator[bytes]:
        """Chunks of one output."""
        ...

    def closing(self) -> Iterator[bytes]:
        """Chunks behind the last output."""
        ...

    def whole(self, choices: list[WholeChoice]) -> bytes:
        """The answer in one piece, JSON."""
        ...


async def answer(
    request: Request, generation: Generation, format: AnswerFormat, headers: dict[str, str], keep_alive: float
) -> Response:
    """The response to an enqueued request; from here on the generation closes by itself."""
    if generation.task.stream:
        return GenerationStream(_frames(generation, format), generation, headers, keep_alive)
    try:
        choices = await _unless_disconnected(request, generation)
        if choices is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        body = format.whole(choices)
    finally:
        await generation.close()
    return Response(body, media_type="application/json", headers=headers)


async def _frames(generation: Generation, format: AnswerFormat) -> AsyncGenerator[bytes]:
    opened = False
    async with aclosing(generation.outputs()) as updates:
        async for outputs in updates:
            if not opened:  # not before: an early failure is to be the first event
                for frame in format.opening():
                    yield frame
                opened = True
            for output in outputs:
                for frame in format.chunks(output):
                    yield frame
    for frame in format.closing():
        yield frame


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
