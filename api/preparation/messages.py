"""From the body of a message to its `Task`, and its count of tokens. Runs on a thread or in a reader process."""

from __future__ import annotations

import msgspec

from api.model_files import ServedModel
from api.preparation.chat import chat_text, prepare_chat, reasoning_format
from api.preparation.rules import RequestRules
from api.preparation.task import Task
from api.request.messages_chat import as_chat
from api.request.messages_schemas import CountTokensRequest, MessagesRequest
from api.request.reasoning import marks_are_tokens
from api.request.tools import check_tools_are_served
from api.request.validation import check_template_fields

ENDPOINT = "/v1/messages"


def prepare_message(body: MessagesRequest, model: ServedModel, rules: RequestRules) -> Task:
    """Its thinking budget counts where the model can keep it: clients send one to any model. Raises BadRequest."""
    chat = as_chat(body)
    if not marks_are_tokens(reasoning_format(model, rules), model.tokenizer.added_ids):
        chat.thinking_token_budget = None
    return prepare_chat(chat, model, rules, ENDPOINT)


def counted(body: CountTokensRequest, model: ServedModel, rules: RequestRules) -> bytes:
    """JSON: the tokens that the same body's message would have as its input. Raises BadRequest."""
    chat = as_chat(body)
    check_template_fields(chat)
    check_tools_are_served(chat, rules.tool_call_parser)
    tokens = model.tokenizer.encode(chat_text(chat, model, rules), add_special_tokens=chat.add_special_tokens)
    return msgspec.json.encode({"input_tokens": len(tokens)})
