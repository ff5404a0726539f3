"""Requests that cannot be answered, each with its exact status and error body, against a running server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.live_server import LiveServer

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
VOCAB = 49152
BAD, SHAPE = "BadRequestError", "Bad Request"  # types of errors: of a value, of the body's shape
AT_LEAST = "Input should be greater than or equal to"
NO_NUMBER, NO_INTEGER = "Input should be a valid number", "Input should be a valid integer"
TOOL = {"type": "function", "function": {"name": "f"}}
CHOOSE_G = {"type": "function", "function": {"name": "g"}}
Case = tuple[str, dict[str, Any], str, str | None, str]  # path, body without its prompt, message, param, type


def value(path: str, fields: dict[str, Any], message: str, param: str | None) -> Case:
    return path, fields, message, param, BAD


def text(message: str, param: str, **fields: Any) -> Case:
    return value(TEXT, fields, message, param)


def chat(message: str, param: str | None, **fields: Any) -> Case:
    return value(CHAT, fields, message, param)


def shape(path: str, param: str, said: str, kind: str, shown: str, **fields: Any) -> Case:
    """A field of the wrong type: one line an error."""
    return path, fields, f"1 validation error:\n  {param}: {said} (type={kind}, input={shown})", param, SHAPE


BAD_VALUES: list[Case] = [
    # Sampling parameters
    text("n must be at least 1, got 0.", "n", n=0),
    text("n must be at most 16384, got 16385.", "n", n=16385),
    text(
        "64 prompt(s) with n=16384 make 1048576 choices; this server answers at most 4096 in one request (--max-choices).",
        "n",
        **{"n": 16384, "prompt": [[500]] * 64, "max_tokens": 1},
    ),
    chat(
        "1 prompt(s) with n=4097 make 4097 choices; this server answers at most 4096 in one request (--max-choices).",
        "n",
        n=4097,
    ),
    text("n must be 1 when using greedy sampling, got 2.", "n", n=2, temperature=0),
    text("presence_penalty must be in [-2, 2], got 2.1.", "presence_penalty", presence_penalty=2.1),
    text("frequency_penalty must be in [-2, 2], got -3.0.", "frequency_penalty", frequency_penalty=-3),
    text("repetition_penalty must be greater than zero, got 0.0.", "repetition_penalty", repetition_penalty=0),
    text("temperature must be non-negative, got -0.1.", "temperature", temperature=-0.1),
    text("temperature must be in [0, 2], got 2.5.", "temperature", temperature=2.5),
    text("top_p must be in (0, 1], got 0.0.", "top_p", top_p=0),
    text("top_p must be in (0, 1], got 1.5.", "top_p", top_p=1.5),
    text("top_k must be 0 (disable), or at least 1, got -2.", "top_k", top_k=-2),
    text("min_p must be in [0, 1], got 1.1.", "min_p", min_p=1.1),
    text("min_tokens must be greater than or equal to 0, got -1.", "min_tokens", min_tokens=-1),
    text(
        "min_tokens=3 cannot be reached: every allowed token would end the output.",
        "min_tokens",
        **{"min_tokens": 3, "max_tokens": 4, "allowed_token_ids": [2]},
    ),
    text(
        "min_tokens=3 cannot be reached: every allowed token would end the output.",
        "min_tokens",
        **{"min_tokens": 3, "max_tokens": 4, "allowed_token_ids": [2], "ignore_eos": True},
    ),
    text(
        "min_tokens=3 cannot be reached: every allowed token would end the output.",
        "min_tokens",
        **{"min_tokens": 3, "max_tokens": 4, "allowed_token_ids": [2, 28], "bad_words": [","]},
    ),
    text(
        "bad_words forbids every token that allowed_token_ids allows: there is none to sample.",
        "bad_words",
        **{"max_tokens": 8, "allowed_token_ids": [28], "bad_words": [","]},
    ),
    text("min_tokens must be less than or equal to max_tokens=4, got 5.", "min_tokens", min_tokens=5, max_tokens=4),
    text("max_tokens must be at least 1, got 0.", "max_tokens", max_tokens=0),
    text("max_tokens must be at least 1, got -1.", "max_tokens", max_tokens=-1),
    text(
        "max_tokens=2049 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        "max_tokens",
        max_tokens=2049,
    ),
    chat(
        "max_completion_tokens=9999 cannot be greater than max_model_len=2048. Please request fewer output tokens.",
        "max_completion_tokens",
        max_completion_tokens=9999,
    ),
    text("stop cannot contain an empty string.", "stop", stop=""),
    text("stop cannot contain an empty string.", "stop", stop=["a", ""]),
    text("stop must contain at most 4 strings, got 5.", "stop", stop=["a", "b", "c", "d", "e"]),
    text(
        f"token_id(s) [{VOCAB}] in stop_token_ids contain out-of-vocab token ids. Vocabulary size: {VOCAB}",
        "stop_token_ids",
        stop_token_ids=[1, VOCAB],
    ),
    text(
        f"token_id(s) [-1] in allowed_token_ids contain out-of-vocab token ids. Vocabulary size: {VOCAB}",
        "allowed_token_ids",
        allowed_token_ids=[-1],
    ),
    text("allowed_token_ids is not None and empty!", "allowed_token_ids", allowed_token_ids=[]),
    text(
        "logit_bias contains key(s) that cannot be converted to integer token IDs: ['a', 'b']",
        "logit_bias",
        logit_bias={"a": 1, "5": 2, "b": 3},
    ),
    text(
        f"token_id(s) [{VOCAB}] in logit_bias contain out-of-vocab token ids. Vocabulary size: {VOCAB}",
        "logit_bias",
        logit_bias={str(VOCAB): 1},
    ),
    text("bad_words cannot contain an empty string. Got bad_words=['']", "bad_words", bad_words=[""]),
    text(
        "Too many bad words after tokenization: 200. The max number is 128.",
        "bad_words",
        bad_words=[f"word{number}" for number in range(100)],
    ),
    text("Too many bad words: 200. The max number is 128.", "bad_words", bad_words=[f"word{number}" for number in range(200)]),
    text("Requested sample logprobs of 21, which is greater than max allowed: 20", "logprobs", logprobs=21),
    text("`logprobs` must be a positive value or -1.", "logprobs", logprobs=-2),
    text("Requested sample logprobs of 49152, which is greater than max allowed: 20", "logprobs", logprobs=-1),
    text("Requested prompt logprobs of 21, which is greater than max allowed: 20", "prompt_logprobs", prompt_logprobs=21),
    text("`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", prompt_logprobs=-2),
    text("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs", prompt_logprobs=1, stream=True),
    # Chat
    chat("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs", top_logprobs=2),
    chat("`top_logprobs` must be a positive value or -1.", "top_logprobs", top_logprobs=-3, logprobs=True),
    chat(
        "Requested sample logprobs of 30, which is greater than max allowed: 20", "top_logprobs", top_logprobs=30, logprobs=True
    ),
    chat("messages must contain at least one message.", "messages", messages=[]),
    chat(
        "Cannot set both `continue_final_message` and `add_generation_prompt` to True.",
        "continue_final_message",
        continue_final_message=True,
    ),
    chat(
        "chat_template is refused: this server was not started with --trust-request-chat-template.",
        "chat_template",
        chat_template="{{ messages }}",
    ),
    chat("chat_template_kwargs must not contain ['messages'].", "chat_template_kwargs", chat_template_kwargs={"messages": []}),
    chat(
        "Content parts of type 'image_url' are not supported: this server takes text only.",
        "messages",
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}]}],
    ),
    chat(
        "A content part of type 'text' needs its text as a string.",
        "messages",
        messages=[{"role": "user", "content": [{"type": "text"}]}],
    ),
    chat(
        "mm_processor_kwargs is not supported: this server takes text only.", "mm_processor_kwargs", mm_processor_kwargs={"a": 1}
    ),
    # Not here (yet)
    chat("`tools` must not be an empty list: omit it.", "tools", tools=[]),
    chat(
        "A function's name must have 1 to 128 characters, of a-z, A-Z, 0-9, _ and -, got 'a b'.",
        "tools.1.function.name",
        tools=[TOOL, {"type": "function", "function": {"name": "a b"}}],
    ),
    chat("When using `tool_choice`, `tools` must be set.", "tool_choice", tool_choice="auto"),
    chat("When using `tool_choice`, `tools` must be set.", "tool_choice", tool_choice=CHOOSE_G),
    chat(
        "tool_choice must be 'none', 'auto', 'required' or name a function, got 'f'.", "tool_choice", tools=[TOOL], tool_choice="f"
    ),
    chat("tool_choice names the function 'g', which is not one of `tools`.", "tool_choice", tools=[TOOL], tool_choice=CHOOSE_G),
    chat(
        "response_format cannot be used when tool_choice makes the output a tool call.",
        "response_format",
        **{"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}},
    ),
    chat(
        "tools.0.function.parameters: the type of a function's parameters must be 'object'.",
        "tools.0.function.parameters",
        **{"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "tool_choice": "required"},
    ),
    chat(
        "The chat template of this model tells nothing of tool calls. Use tool_choice 'required' or a named function, or start "
        "the server with --tool-call-parser and --chat-template.",
        "tools",
        tools=[TOOL],
    ),
    chat(
        "response_format of type 'json_schema' needs json_schema.schema.",
        "response_format",
        response_format={"type": "json_schema"},
    ),
    text(
        "structured_outputs.choice must not be empty or false.",
        "structured_outputs",
        structured_outputs={"choice": []},
    ),
    text(
        "Invalid request: the null model has no tokenizer that a grammar could be about",
        None,
        structured_outputs={"regex": "a+"},
    ),
    text("Beam search is not supported.", "use_beam_search", use_beam_search=True),
    text("logprob_token_ids is not supported.", "logprob_token_ids", logprob_token_ids=[1]),
    text("suffix is not supported.", "suffix", suffix="end"),
    text("prompt_embeds is not supported.", "prompt_embeds", prompt_embeds="AAAA"),
    # Everything else
    text("Stream options can only be defined when `stream=True`.", "stream_options", stream_options={"include_usage": True}),
    text("stream_interval must be at least 1, got 0.", "stream_interval", stream_interval=0),
    text("cache_salt must have 1 to 128 characters and none of @, /, \\ and NUL.", "cache_salt", cache_salt="a/b"),
    text("cache_salt must have 1 to 128 characters and none of @, /, \\ and NUL.", "cache_salt", cache_salt=""),
    text(
        "request_id must have 1 to 128 characters, each a letter, a digit or one of . _ : -", "request_id", request_id="a b"
    ),
    text(
        "request_id must have 1 to 128 characters, each a letter, a digit or one of . _ : -", "request_id", request_id="x" * 129
    ),
    text(
        "truncate_prompt_tokens=4096 cannot be greater than max_model_len = 2048. Please request a smaller truncation size.",
        "truncate_prompt_tokens",
        truncate_prompt_tokens=4096,
    ),
    text("prompt must be given, and must not be an empty list.", "prompt", prompt=None),
    text("prompt must be given, and must not be an empty list.", "prompt", prompt=[]),
    text("The prompt cannot be empty.", "prompt", prompt=""),
    text("The prompt cannot be empty.", "prompt", prompt=["fine", ""]),
    text("Token id 99999 is out of vocabulary", "prompt", prompt=[5, 99999]),
    text("prompt list length 1025 exceeds the maximum allowed count of 1024.", "prompt", prompt=["x"] * 1025),
    text(
        "This model's maximum context length is 2048 tokens. However, your prompt contains 2048 input tokens, "
        "which leaves no room for output tokens. Please reduce the length of the input prompt.",
        "input_tokens",
        prompt=[5] * 2048,
    ),
    text(
        "This model's maximum context length is 2048 tokens. However, your prompt contains 200000 characters (more than "
        "165888 characters, which is the upper bound for 2048 input tokens). Please reduce the length of the input prompt.",
        "input_text",
        prompt="x" * 200_000,
    ),
    value("/detokenize", {"tokens": [VOCAB]}, f"Token id {VOCAB} is out of vocabulary", "tokens"),
    value("/tokenize", {"messages": []}, "messages must contain at least one message.", "messages"),
    # The body's shape
    shape(CHAT, "body.messages", "Field required", "missing", "{'max_tokens': 3}", max_tokens=3, messages=...),
    shape(TEXT, "body.temperature", NO_NUMBER, "float_type", "'warm'", temperature="warm"),
    shape(TEXT, "body.n", "Input should be a valid integer, got a number with a fractional part", "int_from_float", "1.5", n=1.5),
    *(
        shape(path, f"body.{field}", NO_INTEGER, "int_type", "'2'", **{field: "2"})
        for path, field in [
            *((TEXT, field) for field in ("n", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")),
            *((TEXT, field) for field in ("top_k", "seed", "priority")),
            *((TEXT, field) for field in ("truncate_prompt_tokens", "stream_interval")),
            *((CHAT, field) for field in ("n", "max_tokens", "max_completion_tokens", "top_logprobs", "prompt_logprobs")),
        ]
    ),
    *(
        shape(TEXT, f"body.{field}", NO_NUMBER, "float_type", "'0.5'", **{field: "0.5"})
        for field in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    ),
    shape(TEXT, "body.logit_bias.5", NO_NUMBER, "float_type", "'1'", logit_bias={"5": "1"}),
    shape(TEXT, "body.stop_token_ids", NO_INTEGER, "int_type", "[3, '5']", stop_token_ids=[3, "5"]),
    shape(TEXT, "body.n", NO_INTEGER, "int_type", "True", n=True),
    shape(TEXT, "body.allowed_token_ids.0", NO_INTEGER, "int_type", "[]", allowed_token_ids=[[]] * 9),  # one error, not nine
    shape("/detokenize", "body.tokens", NO_INTEGER, "int_type", "['1']", tokens=["1"]),
    shape(TEXT, "body.seed", f"Input should be less than or equal to {2**63 - 1}", "less_than_equal", str(2**63), seed=2**63),
    shape(TEXT, "body.priority", f"{AT_LEAST} -{2**63}", "greater_than_equal", str(-(2**63) - 1), priority=-(2**63) - 1),
    shape(TEXT, "body.logit_bias", "Input should be an object", "dict_type", "[1]", logit_bias=[1]),
    shape(TEXT, "body.truncate_prompt_tokens", f"{AT_LEAST} -1", "greater_than_equal", "-2", truncate_prompt_tokens=-2),
    shape(TEXT, "body.truncation_side", "Input should be 'left' or 'right'", "literal_error", "'top'", truncation_side="top"),
    shape(CHAT, "body.messages.0.role", "Field required", "missing", "{'content': 'x'}", messages=[{"content": "x"}]),
    shape("/detokenize", "body.tokens.0", f"{AT_LEAST} 0", "greater_than_equal", "-1", tokens=[-1]),
]  # fmt: skip


def body_of(path: str, fields: dict[str, Any]) -> dict[str, Any]:
    defaults: dict[str, dict[str, Any]] = {CHAT: {"messages": MESSAGES}, TEXT: {"prompt": "Hi"}}
    body = {**defaults.get(path, {}), **fields}
    return {name: content for name, content in body.items() if content is not ...}


def error(message: str, type: str, code: int, param: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": type, "param": param, "code": code}}


@pytest.mark.parametrize(("path", "fields", "message", "param", "type"), BAD_VALUES)
def test_bad_values_are_refused_with_their_field(
    null_server: LiveServer, path: str, fields: dict[str, Any], message: str, param: str | None, type: str
) -> None:
    answer = null_server.http.post(path, json=body_of(path, fields))
    assert answer.json() == error(message, type, 400, param)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def no_json(said: str) -> dict[str, Any]:
    return error(f"1 validation error:\n  body: Invalid JSON: {said} (type=json_invalid)", SHAPE, 400, "body")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{", no_json("EOF while parsing an object at line 1 column 1")),
        (b'{"prompt": ' + b"[" * 100_000, no_json("recursion limit exceeded at line 1 column 212")),
        (b'{"prompt": "x", "temperature": NaN}', error("temperature must be a finite number, got nan.", BAD, 400, "temperature")),
        (
            b'{"prompt": "x", "repetition_penalty": Infinity}',
            error("repetition_penalty must be a finite number, got inf.", BAD, 400, "repetition_penalty"),
        ),
        (b'{"prompt": "x", "logit_bias": {"5": NaN}}', error("logit_bias values must be numbers.", BAD, 400, "logit_bias")),
    ],
)
def test_broken_json_and_numbers_that_are_not_finite_are_refused(
    null_server: LiveServer, content: bytes, expected: dict[str, Any]
) -> None:
    answer = null_server.http.post(TEXT, content=content, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()) == (400, expected)


def test_a_pair_of_surrogates_is_a_character(null_server: LiveServer) -> None:
    content = b'{"prompt": "\\ud83d\\ude80", "echo": true, "max_tokens": 0}'
    answer = null_server.http.post(TEXT, content=content, headers={"Content-Type": "application/json"})
    assert answer.json()["choices"][0]["text"] == "🚀"


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("GET", "/nowhere", 404, error("There is no GET /nowhere on this server.", "Not Found", 404)),
        ("POST", "/v1/embeddings", 404, error("There is no POST /v1/embeddings on this server.", "Not Found", 404)),
        ("GET", CHAT, 405, error("Method Not Allowed", "Method Not Allowed", 405)),
        ("PUT", TEXT, 405, error("Method Not Allowed", "Method Not Allowed", 405)),
        ("GET", "/v1/models/gone", 404, error("The model `gone` does not exist.", "NotFoundError", 404, "model")),
        ("GET", "/v1/requests/gone", 404, error("No request with id 'gone' is known.", "NotFoundError", 404, "request_id")),
        ("DELETE", "/v1/requests/gone", 404, error("No request with id 'gone' is known.", "NotFoundError", 404, "request_id")),
        ("POST", "/v1/requests/gone/cancel", 404, error("No request with id 'gone' is known.", "NotFoundError", 404, "request_id")),
        ("GET", "/v1/requests?model=gone", 404, error("The model `gone` does not exist.", "NotFoundError", 404, "model")),
        (
            "GET",
            "/v1/requests?limit=0",
            400,
            error(
                f"1 validation error:\n  query.limit: {AT_LEAST} 1 (type=greater_than_equal, input='0')",
                SHAPE,
                400,
                "query.limit",
            ),
        ),
    ],
)
def test_unknown_routes_requests_and_models_are_refused(
    null_server: LiveServer, method: str, path: str, status: int, expected: dict[str, Any]
) -> None:
    answer = null_server.http.request(method, path)
    assert (answer.status_code, answer.json()) == (status, expected)


def test_an_unknown_model_is_a_404(null_server: LiveServer) -> None:
    answer = null_server.http.post(TEXT, json={"prompt": "x", "model": "gpt-17"})
    expected = error("The model `gpt-17` does not exist. Valid aliases: `tiny`.", "NotFoundError", 404, "model")
    assert (answer.status_code, answer.json()) == (404, expected)


@pytest.mark.parametrize("given", ["soon", "1.5", str(2**63)])
def test_bad_priorities_in_the_header_are_refused(null_server: LiveServer, given: str) -> None:
    answer = null_server.http.post(TEXT, json={"prompt": "x"}, headers={"X-Vllm-Priority": given})
    message = "X-Vllm-Priority must be an integer of 64 bits."
    assert (answer.status_code, answer.json()) == (400, error(message, BAD, 400, "X-Vllm-Priority"))


def test_documents_that_the_template_does_not_read_are_no_error(null_server: LiveServer) -> None:
    answer = null_server.http.post(CHAT, json={"messages": MESSAGES, "documents": [{"a": 1}], "max_tokens": 1})
    assert answer.status_code == 200
