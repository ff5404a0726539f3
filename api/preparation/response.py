"""From the body of a response to its `Task`, by way of a chat completion. Runs on a thread or in a reader process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from api.errors import BadRequest
from api.model_files import ServedModel
from api.preparation.chat import prepare_chat
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.kept_response import KeptResponse
from api.request.response_chat import chat_request, check_response, in_own_words, shown_fields
from api.request.response_items import Item, input_items
from api.request.response_schemas import ResponsesRequest

ENDPOINT = "/v1/responses"
TOO_LONG = ("input_tokens", "input_text", "max_output_tokens")  # `param` of errors about prompts that leave no room


@dataclass(frozen=True)
class Past:
    """Stored items that a body refers to: the conversation of `previous_response_id`, and single items by id."""

    conversation: Sequence[Item] = ()
    items: Mapping[str, Item] = field(default_factory=dict)


def prepare_response(body: ResponsesRequest, model: ServedModel, rules: RequestRules, past: Past) -> Task:
    """Raises BadRequest."""
    check_response(body)
    items = [*past.conversation, *input_items(body.input, past.items)]
    if body.truncation == "auto":
        items, task = _truncated(body, items, model, rules)
    else:
        task = _chat_task(body, items, model, rules)
    kept = KeptResponse(shown_fields(body), items if body.store is not False else [])
    payload = kept.encoded()
    if len(payload) > rules.limits.max_kept_bytes:
        rules.limits.check_kept(kept.sizes())
    return replace(task, kept_body=payload, background=bool(body.background))


def _chat_task(body: ResponsesRequest, items: Sequence[Item], model: ServedModel, rules: RequestRules) -> Task:
    try:
        return prepare_chat(chat_request(body, items), model, rules, ENDPOINT)
    except BadRequest as error:
        raise in_own_words(error) from None


def _truncated(body: ResponsesRequest, items: list[Item], model: ServedModel, rules: RequestRules) -> tuple[list[Item], Task]:
    """The conversation without its oldest turns, as many as must go for the rest to fit. A turn begins with a message of the user;
    messages of the system stay. Raises BadRequest where the last turn alone is too long."""
    cuts = [place for place, item in enumerate(items) if item["type"] == "message" and item["role"] == "user" and place > 0]
    try:
        return items, _chat_task(body, items, model, rules)
    except BadRequest as error:
        if error.param not in TOO_LONG or not cuts:
            raise
    best: tuple[list[Item], Task] | None = None
    lowest, highest = 0, len(cuts) - 1
    while lowest <= highest:
        middle = (lowest + highest) // 2
        rest = [item for place, item in enumerate(items) if place >= cuts[middle] or _stays(item)]
        try:
            best = rest, _chat_task(body, rest, model, rules)
            highest = middle - 1
        except BadRequest as error:
            if error.param not in TOO_LONG or middle == len(cuts) - 1:
                raise
            lowest = middle + 1
    assert best is not None
    return best


def _stays(item: Item) -> bool:
    return item["type"] == "message" and item["role"] in ("system", "developer")
