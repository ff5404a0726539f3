"""Answers to requests that any API server enqueued before.

Streams continue behind the client's last event, ended requests give their kept answers, and retries with the same Idempotency-Key
get the answer of the first.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from fastapi import Request
from starlette.responses import Response

from api.app_state import Service, principal_of, service_of
from api.errors import RETRY_AFTER, ApiError, NotFound, ServiceUnavailable
from api.http.headers import header
from api.http.request_ids import answer_headers, is_safe_id, sibling_ids
from api.http.response_writer import response_writer
from api.preparation.task import Task
from api.request.prompts import Prompt
from api.request.response_schemas import ID_PREFIX
from api.response.answer import WholeAnswer, whole_body, whole_response
from api.response.answer_format import AnswerFormat
from api.response.chat_format import ChatFormat
from api.response.completion_format import CompletionFormat
from api.response.generation import Generation
from api.response.messages_format import MessagesFormat
from api.response.output_processor import ChoiceOutput
from api.response.response_format import ResponseFormat
from api.response.sse import EventSink, EventStream
from api.response.stream_position import StreamPosition
from engine.bus import records
from engine.bus.records import Found, RecordView
from engine.client.request_stream import RequestStream
from engine.protocol import FOREVER, PROTOCOL_VERSION, EngineCoreRequest, FinishReason, RequestOutline

LAST_EVENT_ID = b"last-event-id"
FORMATS: dict[str, type[ChatFormat] | type[CompletionFormat] | type[ResponseFormat] | type[MessagesFormat]] = {
    "/v1/chat/completions": ChatFormat,
    "/v1/completions": CompletionFormat,
    "/v1/responses": ResponseFormat,
    "/v1/messages": MessagesFormat,
}


@dataclass(frozen=True)
class Recalled:
    """The request of one HTTP request, as Redis has it."""

    model: str  # canonical
    generation: Generation
    requests: list[EngineCoreRequest]  # one a prompt, with handles of this server; of their prompts only what answers show

    def format(self, service: Service, position: StreamPosition | int | None = None) -> AnswerFormat:
        return FORMATS[self.generation.task.endpoint](self.generation, service.config, position)


async def recall(service: Service, model: str, record: RecordView) -> Recalled:
    """The HTTP request that the request of `record` belongs to. Raises NotFound, ServiceUnavailable, BusUnavailable."""
    ids, outlines = await _outlines(service, model, record)
    facts = outlines[0].facts
    prompts = [_prompt_token_ids(outline) for outline in outlines]
    task = Task(
        facts.endpoint,
        await service.resolve(facts.model),
        [Prompt(token_ids, outline.facts.prompt_text) for token_ids, outline in zip(prompts, outlines, strict=True)],
        [outline.sampling for outline in outlines],
        facts.answer,
        facts.stream,
        kept_body=facts.kept_body,
        background=facts.grace >= FOREVER,
    )
    external = facts.external_id or record.id
    generation = Generation(task, external, ids, facts.created, record.tenant, service.attached_observer, facts.grace)
    requests = [
        EngineCoreRequest(
            PROTOCOL_VERSION,
            request_id,
            token_ids.tobytes(),
            outline.sampling,
            service.client.incarnation,
            service.client.next_handle(),
            tenant=record.tenant,
            facts=outline.facts,
        )
        for request_id, token_ids, outline in zip(ids, prompts, outlines, strict=True)
    ]
    return Recalled(model, generation, requests)


async def _outlines(service: Service, model: str, record: RecordView) -> tuple[list[str], list[RequestOutline]]:
    """Ids and outlines of an HTTP request's prompts. Raises NotFound, BusUnavailable."""
    (first,) = await service.bus.run(records.outlines(model, [record.id]))
    if first is None or first.facts.endpoint not in FORMATS:
        raise _not_kept(record)
    if first.facts.num_prompts == 1:
        return [record.id], [first]
    ids = sibling_ids(record.id, first.facts.external_id, first.facts.num_prompts)
    found = await service.bus.run(records.outlines(model, ids))
    outlines = [outline for outline in found if outline is not None]
    if len(outlines) < len(ids):
        raise _not_kept(record)
    return ids, outlines


async def visible_requests(request: Request, request_id: str) -> list[Found]:
    """Those of an internal, external or answer id that the key may see. Raises BusUnavailable."""
    service, principal = service_of(request), principal_of(request)
    if not is_safe_id(request_id.removeprefix(ID_PREFIX)):
        return []
    found = await service.bus.run(records.look_up(service.models.known(service.client), request_id))
    return [each for each in found if principal.may_see(each.record.tenant)]


def _not_kept(record: RecordView) -> NotFound:
    return NotFound(f"The answer of request '{record.id}' is not kept.", param="request_id")


def _prompt_token_ids(outline: RequestOutline) -> array[int]:
    """Those that the outline has. Zeros stand for those before: the answer counts them and shows nothing of them."""
    token_ids = array("i", bytes(4 * outline.num_prompt_tokens - len(outline.prompt_token_ids)))
    token_ids.frombytes(outline.prompt_token_ids)
    return token_ids


async def retried_stream(request: Request, recalled: Recalled) -> Response:
    """The stream for a retry with the same Idempotency-Key.

    Raises ServiceUnavailable where the request was aborted, as after a 503 to its first client: the next retry runs it again.
    """
    service, generation = service_of(request), recalled.generation
    stream = await continued_stream(request, recalled)
    try:
        if await service.bus.run(records.any_given_up(recalled.model, generation.internal_ids)):
            raise _aborted()
    except BaseException:
        stream.leave()
        raise
    return stream


async def continued_stream(request: Request, recalled: Recalled, starting_after: str | None = None) -> EventStream:
    """A stream of the events behind the one whose id the client gives: in Last-Event-ID, else `starting_after`; all without one.

    It becomes the one stream that listens to the request. Raises BadRequest, BusUnavailable.
    """
    service, generation = service_of(request), recalled.generation
    last = header(request.scope, LAST_EVENT_ID) or starting_after
    num_choices = generation.task.num_choices
    position = FORMATS[generation.task.endpoint].position(last, num_choices)
    events = generation.sink = EventSink(recalled.format(service, position), service.output_budget)
    try:
        generation.begin(await service.client.attach(recalled.model, recalled.requests, generation.runs))
    except BaseException:
        events.close()
        raise
    return EventStream(
        generation, events, answer_headers(generation.external_id, generation.internal_ids), service.config.sse_keep_alive_interval
    )


class FollowedAnswer(WholeAnswer):
    """Whole where the request was: a retry with the key of an aborted one runs again."""

    async def choices(self) -> list[ChoiceOutput]:
        choices = await super().choices()
        if any(choice.finish_reason is FinishReason.ABORT for choice in choices):
            raise _aborted()
        return choices


def _aborted() -> ServiceUnavailable:
    return ServiceUnavailable("The request with this Idempotency-Key was aborted. Try again.", headers=RETRY_AFTER)


async def followed_answer(request: Request, recalled: Recalled) -> Response:
    """The whole answer, once the request has ended; the stream that listens to it is left alone. Raises ServiceUnavailable."""
    service, generation = service_of(request), recalled.generation
    format = recalled.format(service)
    whole = generation.sink = FollowedAnswer(generation.task.num_choices, format.tells_each_output)
    generation.begin(service.client.follow(recalled.model, recalled.requests, generation.runs))
    writer = response_writer(request.scope)
    return await whole_response(generation, whole, format, writer, answer_headers(generation.external_id, generation.internal_ids))


async def stored_answer(service: Service, recalled: Recalled) -> bytes | None:
    """The answer of an ended request, as its endpoint gives it, JSON. None: it failed, or its output is not kept any more."""
    try:
        format = recalled.format(service)
        whole = WholeAnswer(recalled.generation.task.num_choices, format.tells_each_output)
        choices = await stored_choices(service, recalled, whole)
        return None if choices is None else await whole_body(recalled.generation, choices, format)
    except ApiError:
        return None


async def stored_choices(service: Service, recalled: Recalled, whole: WholeAnswer) -> list[ChoiceOutput] | None:
    """The output of an ended request, by way of `whole`, which may raise the error that it ended with. None: it is not kept."""
    generation = recalled.generation
    generation.sink = whole
    generation.begin([])
    try:
        for request, run in zip(recalled.requests, generation.runs, strict=True):
            stored = await service.bus.run(records.stored_output(recalled.model, request.request_id))
            if stored is None:
                return None
            RequestStream(request, recalled.model, run, _nothing_to_finish, _nothing_to_close).take_stored(stored)
        return await whole.choices()
    finally:
        generation.close()


def _nothing_to_finish(stream: RequestStream, choice: int, reason: FinishReason, keep: int, stop_reason: str | None) -> None:
    """A stop string found in stored output: the request has ended."""


def _nothing_to_close(stream: RequestStream) -> None:
    """The stream was never a client's."""
