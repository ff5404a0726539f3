"""Responses out of Redis: whole as they are now, and as the past of new ones. Each is derived from its request's record and
output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import Request

from api.app_state import Service, service_of
from api.continuation import Recalled, recall, stored_choices, visible_requests
from api.errors import ApiError, BadRequest, NotFound
from api.preparation.response import ENDPOINT, Past
from api.request.kept_response import KeptResponse
from api.request.response_items import Item, response_of_item
from api.request.schemas import ItemReferences
from api.response.answer import WholeAnswer, whole_body
from api.response.output_processor import ChoiceOutput
from api.response.response_format import ResponseFormat
from engine.bus.records import RecordView


@dataclass(frozen=True)
class StoredResponse:
    model: str  # canonical
    record: RecordView
    recalled: Recalled
    kept: KeptResponse

    @property
    def input_items(self) -> list[Item]:
        return self.kept.input_items(self.record.id)


async def find_response(request: Request, response_id: str) -> StoredResponse | None:
    """None: there is none, it is another tenant's, was not stored, was deleted, or is not kept any more. Raises BusUnavailable."""
    service = service_of(request)
    found = [
        each for each in await visible_requests(request, response_id) if each.record.endpoint == ENDPOINT and not each.record.hidden
    ]
    for model, record in found:  # newest first
        try:
            recalled = await recall(service, model, record)
        except NotFound:
            continue
        kept = KeptResponse.decoded(recalled.generation.task.kept_body)
        if kept.shown["store"]:
            return StoredResponse(model, record, recalled, kept)
    return None


def may_be_shown(record: RecordView, recalled: Recalled) -> bool:
    """False for a response that was deleted or not stored. Answers of other endpoints are shown as long as they are kept."""
    kept = recalled.generation.task.kept_body
    return not record.hidden and (not kept or bool(KeptResponse.decoded(kept).shown["store"]))


class _AsFarAsKnown(WholeAnswer):
    """With an error where the answer broke off."""

    error: ApiError | None = None

    def end(self, error: ApiError | None = None) -> None:
        self.error = error
        super().end()


async def response_now(service: Service, recalled: Recalled, record: RecordView) -> bytes:
    """The response object, JSON."""
    format = _format(service, recalled)
    if record.state != "ended":
        has_begun = record.state != "queued" or record.received
        return format.unfinished("in_progress" if has_begun else "queued")
    output, error = await _stored_output(service, recalled)
    return await whole_body(recalled.generation, [output], format) if error is None else format.failed(output, error)


async def _stored_output(service: Service, recalled: Recalled) -> tuple[ChoiceOutput, ApiError | None]:
    whole = _AsFarAsKnown(1, keeps_pieces=True)
    choices = await stored_choices(service, recalled, whole)
    if choices is None:
        raise NotFound("The response is not kept any more.", param="response_id")
    return choices[0], whole.error


def _format(service: Service, recalled: Recalled) -> ResponseFormat:
    return ResponseFormat(recalled.generation, service.config)


async def past_of(request: Request, previous_id: str | None, references: ItemReferences) -> Past:
    """The stored items that a new response goes on from. Raises NotFound, BadRequest."""
    conversation: list[Item] = []
    if previous_id is not None:
        previous = await find_response(request, previous_id)
        if previous is None:
            message = f"Previous response with id '{previous_id[:200]}' not found."
            raise NotFound(message, param="previous_response_id")
        conversation = await _all_items(request, previous, "previous_response_id")
    known = {item["id"]: item for item in conversation}
    looked_up: set[str] = set()  # a response is read once, however many of its items are named
    for id in references.ids:
        response = response_of_item(id)
        if id in known or response is None or response in looked_up:
            continue
        looked_up.add(response)
        if (stored := await find_response(request, response)) is not None:
            known |= {item["id"]: item for item in await _all_items(request, stored, "input")}
    return Past(conversation, {id: known[id] for id in references.ids if id in known})


async def _all_items(request: Request, stored: StoredResponse, param: str) -> list[Item]:
    """The conversation of a response, its output too."""
    if stored.record.state != "ended":
        raise BadRequest(f"The response 'resp_{stored.record.id}' has not ended yet.", param=param)
    service = service_of(request)
    output, error = await _stored_output(service, stored.recalled)
    if error is not None:
        raise BadRequest(f"The response 'resp_{stored.record.id}' has failed.", param=param)
    format = _format(service, stored.recalled)
    await whole_body(stored.recalled.generation, [output], format)
    made: list[dict[str, Any]] = format.items
    return [*stored.input_items, *made]
