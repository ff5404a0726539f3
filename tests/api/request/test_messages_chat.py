"""What a conversation of Anthropic's becomes as a chat completion."""

from __future__ import annotations

from typing import Any

from api.request.messages_chat import as_chat
from api.request.messages_schemas import CountTokensRequest, MessagesRequest

USER = {"role": "user", "content": "x"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}


def chat(**fields: Any) -> dict[str, Any]:
    """The members that were set."""
    body = MessagesRequest.model_validate({"model": "tiny", "max_tokens": 2000, "messages": [USER], **fields})
    return as_chat(body).model_dump(exclude_unset=True, exclude_none=True, by_alias=True)


def test_messages() -> None:
    call = {"type": "tool_use", "id": "t1", "name": "f", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "12"}], "is_error": False}
    empty = {"type": "tool_result", "tool_use_id": "t2"}
    cached = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    assert chat(
        system=[cached, {"type": "text", "text": "b"}],
        messages=[
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "s"},
                    {"type": "redacted_thinking", "data": "d"},
                    {"type": "text", "text": "I look."},
                    call,
                    {**call, "id": "t2", "input": {}},
                ],
            },
            {"role": "user", "content": [{"type": "text", "text": "So?"}, result, empty]},
        ],
    )["messages"] == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        USER,
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "reasoning_content": "Hm.",
            "tool_calls": [
                {"id": "t1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Oslo"}'}},
                {"id": "t2", "type": "function", "function": {"name": "f", "arguments": "{}"}},
            ],
        },
        {"role": "tool", "tool_call_id": "t1", "content": [{"type": "text", "text": "12"}]},
        {"role": "tool", "tool_call_id": "t2", "content": ""},
        {"role": "user", "content": [{"type": "text", "text": "So?"}]},
    ]


def test_a_message_that_the_assistant_has_begun() -> None:
    begun = chat(messages=[USER, {"role": "assistant", "content": "I th"}])
    assert (begun["add_generation_prompt"], begun["continue_final_message"]) == (False, True)
    assert "continue_final_message" not in chat()


def test_tools_and_choices() -> None:
    tools = [
        {"name": "f", "description": "Looks.", "input_schema": SCHEMA, "strict": True, "cache_control": {"type": "ephemeral"}},
        {"name": "g", "type": "custom", "input_schema": {}},
    ]
    made = chat(tools=tools, tool_choice={"type": "tool", "name": "g"})
    assert made["tools"] == [
        {"type": "function", "function": {"name": "f", "description": "Looks.", "parameters": SCHEMA, "strict": True}},
        {"type": "function", "function": {"name": "g", "parameters": {}}},
    ]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    for given, expected in (("auto", "auto"), ("any", "required"), ("none", "none")):
        made = chat(tools=tools, tool_choice={"type": given, "disable_parallel_tool_use": given == "any"})
        assert (made["tool_choice"], made["parallel_tool_calls"]) == (expected, given != "any")
    assert chat(tools=[]).keys() & {"tools", "tool_choice", "parallel_tool_calls"} == set()


def test_thinking_effort_and_the_form_of_the_output() -> None:
    enabled = chat(thinking={"type": "enabled", "budget_tokens": 1024})
    assert enabled["thinking_token_budget"] == 1024
    assert (enabled["chat_template_kwargs"], enabled["include_reasoning"]) == ({"enable_thinking": True}, True)
    disabled = chat(thinking={"type": "disabled"})
    assert (disabled["chat_template_kwargs"], disabled["include_reasoning"]) == ({"enable_thinking": False}, False)
    adaptive = chat(thinking={"type": "adaptive"}, chat_template_kwargs={"enable_thinking": False, "x": 1})
    assert adaptive["chat_template_kwargs"] == {"enable_thinking": False, "x": 1}
    assert "thinking_token_budget" not in adaptive and "chat_template_kwargs" not in chat()
    made = chat(output_config={"effort": "high", "format": {"type": "json_schema", "schema": SCHEMA}})
    assert made["reasoning_effort"] == "high"
    assert made["response_format"]["json_schema"]["schema"] == SCHEMA


def test_sampling_and_what_is_the_users() -> None:
    made = chat(
        stop_sequences=["a", "b"], temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "me"}, stream=True, unknown={"x": 1}
    )
    expected = {"max_tokens": 2000, "stop": ["a", "b"], "temperature": 0.5, "top_k": 3, "top_p": 0.9, "user": "me", "stream": True}
    assert expected.items() <= made.items()


def test_a_conversation_that_is_counted_needs_no_limit_of_its_answer() -> None:
    body = CountTokensRequest.model_validate({"model": "tiny", "messages": [USER], "thinking": {"type": "enabled"}})
    assert as_chat(body).messages[0].content == "x"
