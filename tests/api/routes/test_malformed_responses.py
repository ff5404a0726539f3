"""Bodies of responses that cannot be: each gets its status and says what is wrong, and nothing of it runs."""

from __future__ import annotations

from typing import Any

from tests.api.live_server import LiveServer

NO_IMAGE = "input.0.content.0: content parts of type 'input_image' are not supported: this server takes text only."
NO_FILE = "input.0.content.0: content parts of type 'input_file' are not supported: this server takes text only."
NO_SEARCH = "tools.0: tools of type 'web_search' are not supported: this server takes functions, and runs no tools."
NO_MCP = "tools.0: tools of type 'mcp' are not supported: this server takes functions, and runs no tools."
NO_INNER = "tools.0.tools.0: tools of type 'None' are not supported: this server takes functions, and runs no tools."
NO_CALL_ITEM = (
    "input.0: items of type 'web_search_call' are not supported: this server takes message, function_call, function_call_output, "
    "reasoning and item_reference."
)
NO_INCLUDE = "include: 'web_search_call.results' is not supported. This server includes message.output_text.logprobs."
NO_REFERENCE = "input.0: no stored item has the id 'msg_gone_0'."
NO_CONTENT = "input.0.content must be a text or a list of parts."
NO_OUTPUT = "input.0.output must be a text or a list of parts."
BAD_ROLE = "input.0.role must be one of user, assistant, system, developer, got 'critic'."
NO_ROOM = "max_output_tokens=100000 cannot be greater than max_model_len=2048. Please request fewer output tokens."
NOT_STORED = "background needs store: a response that is not stored cannot be retrieved."
EFFORTS = "'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'"
BAD_NAME = "A function's name must have 1 to 128 characters, of a-z, A-Z, 0-9, _ and -, got 'a b'."
NOT_OFFERED = "tool_choice names the function 'g', which is not one of `tools`."
BAD_SCHEMA = "text.format: the schema is not supported: Invalid type: nothing"
LONG_METADATA = "metadata: a key has at most 64 characters, and a value 512."
F: dict[str, Any] = {"type": "function", "name": "f"}


def call(**fields: Any) -> dict[str, Any]:
    return {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"} | fields]}


def part(kind: str, **fields: Any) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": [{"type": kind, **fields}]}]}


def text(**format: Any) -> dict[str, Any]:
    return {"text": {"format": format}}


def wrong(field: str, message: str) -> str:
    return f"1 validation error:\n  body.{field}: {message}"


CASES: list[tuple[dict[str, Any], str, str]] = [  # members of the body, and the error's `message` and `param`
    ({"input": []}, "input must be a text or a list of at least one item.", "input"),
    ({"input": [{"role": "critic", "content": "x"}]}, BAD_ROLE, "input.0.role"),
    ({"input": [{"role": "user"}]}, NO_CONTENT, "input.0.content"),
    (part("input_image", image_url="data:"), NO_IMAGE, "input.0.content.0.type"),
    (part("input_file", file_id="f"), NO_FILE, "input.0.content.0.type"),
    (part("input_text"), "input.0.content.0.text must be a text.", "input.0.content.0.text"),
    (call(call_id=None), "input.0.call_id must be a text.", "input.0.call_id"),
    (call(arguments={}), "input.0.arguments must be a text.", "input.0.arguments"),
    (call(id=5), "input.0.id must be a text.", "input.0.id"),
    ({"input": [{"type": "function_call_output", "call_id": "c"}]}, NO_OUTPUT, "input.0.output"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "input must have a message, a function's call or its output.", "input"),
    ({"input": [{"type": "reasoning", "summary": "x"}]}, "input.0.summary must be a list of parts.", "input.0.summary"),
    ({"input": [{"type": "web_search_call", "id": "ws"}]}, NO_CALL_ITEM, "input.0.type"),
    ({"input": [{"type": "item_reference", "id": "msg_gone_0"}]}, NO_REFERENCE, "input.0.id"),
    ({"tools": [{"type": "web_search"}]}, NO_SEARCH, "tools.0.type"),
    ({"tools": [{"type": "mcp", "server_label": "a"}]}, NO_MCP, "tools.0.type"),
    ({"tools": [{"type": "namespace", "name": "n"}]}, "tools.0.tools must be a list of functions.", "tools.0.tools"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{}]}]}, NO_INNER, "tools.0.tools.0.type"),
    ({"tools": [{"type": "function"}]}, "tools.0.name must be a text.", "tools.0.name"),
    ({"tools": [{**F, "name": "a b"}]}, BAD_NAME, "tools.0.name"),
    ({"tools": [{**F, "parameters": []}]}, "tools.0.parameters must be an object.", "tools.0.parameters"),
    ({"tools": [{**F, "strict": "yes"}]}, "tools.0.strict must be true or false.", "tools.0.strict"),
    ({"tool_choice": "required"}, "When using `tool_choice`, `tools` must be set.", "tool_choice"),
    ({"tool_choice": {"type": "x"}}, "tool_choice of type 'x' is not supported: name a function.", "tool_choice.type"),
    ({"tools": [F], "tool_choice": {"type": "function", "name": "g"}}, NOT_OFFERED, "tool_choice"),
    (text(type="json_schema", name="a"), "text.format of type json_schema needs `schema`.", "text.format.schema"),
    (text(type="json_schema", name="a", schema={"type": "nothing"}), BAD_SCHEMA, "text.format"),
    ({"background": True, "store": False}, NOT_STORED, "background"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported.", "prompt"),
    ({"conversation": "conv_1"}, "conversation is not supported.", "conversation"),
    ({"include": ["web_search_call.results"]}, NO_INCLUDE, "include.0"),
    ({"metadata": dict.fromkeys("abcdefghijklmnopq", "")}, "metadata may have at most 16 pairs, got 17.", "metadata"),
    ({"metadata": {"a": "x" * 513}}, LONG_METADATA, "metadata.a"),
    ({"temperature": 3}, "temperature must be in [0, 2], got 3.0.", "temperature"),
    ({"top_logprobs": 21}, "top_logprobs must be between 0 and 20, got 21.", "top_logprobs"),
    ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0.", "max_output_tokens"),
    ({"max_output_tokens": 100_000}, NO_ROOM, "max_output_tokens"),
    ({"stop": ["a"] * 5}, "stop must contain at most 4 strings, got 5.", "stop"),
]
OF_THE_WRONG_TYPE: list[tuple[dict[str, Any], str, str]] = [  # likewise; the message is that of one field
    ({"metadata": {"a": 1}}, "metadata.a", "Input should be a valid string (type=string_type, input=1)"),
    ({"temperature": "1"}, "temperature", "Input should be a valid number (type=float_type, input='1')"),
    ({"truncation": "left"}, "truncation", "Input should be 'auto' or 'disabled' (type=literal_error, input='left')"),
    ({"reasoning": {"effort": "x"}}, "reasoning.effort", f"Input should be {EFFORTS} (type=literal_error, input='x')"),
]


def test_malformed_bodies_get_a_400_that_names_what_is_wrong(null_server: LiveServer) -> None:
    cases = [(body, message, param, "BadRequestError") for body, message, param in CASES]
    cases += [(body, wrong(field, message), f"body.{field}", "Bad Request") for body, field, message in OF_THE_WRONG_TYPE]
    for body, message, param, kind in cases:
        answer = null_server.http.post("/v1/responses", json={"input": "x", **body})
        expected = {"error": {"message": message, "type": kind, "param": param, "code": 400}}
        assert (answer.status_code, answer.json()) == (400, expected), body


def test_what_is_not_there_is_a_404(null_server: LiveServer) -> None:
    for body, message, param in (
        ({"previous_response_id": "resp_gone"}, "Previous response with id 'resp_gone' not found.", "previous_response_id"),
        ({"model": "gone"}, "The model `gone` does not exist. Valid aliases: `tiny`.", "model"),
    ):
        answer = null_server.http.post("/v1/responses", json={"input": "x", **body})
        assert (answer.status_code, answer.json()["error"]["message"], answer.json()["error"]["param"]) == (404, message, param)
