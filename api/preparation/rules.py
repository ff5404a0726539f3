"""The API server's settings that decide how a body is read. They travel to reader processes with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from api.request.limits import RequestLimits
from api.request.tools import AUTO


@dataclass(frozen=True)
class RequestRules:
    """`template_defaults`: variables of every chat template, where the request does not say them."""

    limits: RequestLimits = RequestLimits()
    trust_request_chat_template: bool = False
    special_tokens_in_messages: bool = False
    template_defaults: dict[str, Any] = field(default_factory=dict)
    force_include_usage: bool = False  # streams tell their usage, asked or not
    prompt_tokens_details: bool = False
    tokens_as_token_ids: bool = False  # in logprobs, where the request does not say it
    tool_call_parser: str = AUTO
    reasoning_parser: str = AUTO
