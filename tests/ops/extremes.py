"""Bodies of completions and chat whose fields stand at their borders, two or three fields at a time, drawn by a seed.

Bodies are JSON text, which can say more than Python's encoder does: 1e999, numbers of 400 digits, halves of surrogate pairs.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 49152
EOS, COMMA = 2, 28


class Raw(str):
    """JSON text as it stands."""


def to_json(value: Any) -> str:
    if isinstance(value, Raw):
        return value
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(key)}:{to_json(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(to_json, value)) + "]"
    return json.dumps(value)


HUGE = [2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, Raw("1" + "0" * 400)]
WHOLE = [-(2**63) - 1, -(2**63), -(2**31), -2, -1, 0, 1, 2, *HUGE]
ODD = [None, True, False, "", "2", "x", [], {}, [None], [[]], Raw("NaN"), Raw("-0"), 0.5, Raw("[" * 200 + "]" * 200)]
REAL = [
    Raw("1e999"),
    Raw("-1e999"),
    Raw("NaN"),
    1.7e308,
    -1.7e308,
    5e-324,
    1e-300,
    1e-7,
    1e-5,
    1e-4,
    0.0,
    Raw("-0.0"),
    0.5,
    1.0,
    2.0,
    2.1,
]
TEXTS = ["", " ", "a", ",", " ,", "\u0000", "\ufeff", "\u2028", "語", "🙂", Raw('"\\ud800"'), "x" * 5000, "<|im_end|>", "é" * 300]
TOKEN_LISTS = [
    [],
    [0],
    [EOS],
    [COMMA],
    [COMMA, COMMA],
    [EOS, COMMA],
    list(range(300)),
    [VOCAB_SIZE - 1],
    [VOCAB_SIZE],
    [-1],
    [2**31],
    [2**63],
    ["2"],
    [0.5],
    [True],
]
WORD_LISTS = [
    [","],
    [" ,"],
    [", ,"],
    [",,"],
    [",", ",,"],
    [",,,", ", ,"],
    [""],
    ["a"] * 200,
    ["x" * 2000],
    ["\u0000"],
    ["a", "b", "c", "d", "e"],
]
BIASES = [
    {},
    {str(COMMA): -100},
    {str(COMMA): 100},
    {str(COMMA): 1e308},
    {str(COMMA): Raw("-1e999")},
    {str(COMMA): Raw("NaN")},
    {str(EOS): 100},
    {str(token): -100 for token in range(400)},
    {"-1": 1},
    {str(VOCAB_SIZE): 1},
    {"x": 1},
    {"1e3": 1},
    {"9" * 30: 1},
    {"28": 1, " 28": 2, "+28": 3, "2_8": 4},
]
FLAG = [True, False, None, "true", 1, 0, 2]
_LOOP = {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/a"}} for _ in range(50)]}
_NESTED: dict[str, Any] = {}
for _ in range(200):
    _NESTED = {"type": "array", "items": _NESTED}
SCHEMAS: list[Any] = [
    {},
    True,
    False,
    1,
    "",
    [],
    {"type": "x"},
    {"type": "object", "properties": 3},
    {"not": {}},
    {"enum": []},
    {"const": None},
    {"type": "string", "minLength": 5, "maxLength": 2},
    {"type": "integer", "minimum": 5, "maximum": 2},
    {"type": "number", "multipleOf": 0},
    {"type": "integer", "minimum": 1e308},
    {"type": "string", "pattern": "("},
    {"type": "string", "pattern": "(?=a)"},
    {"format": "no"},
    {"type": "array", "minItems": 2**31},
    {"type": "string", "maxLength": 2**63},
    {"$ref": "#"},
    {"$ref": "#/$defs/a"},
    {"$ref": "http://127.0.0.1:1/a"},
    {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
    {"$ref": "#/$defs/a", "$defs": {"a": _LOOP}},
    {"type": "object", "properties": {f"p{number}": {} for number in range(1000)}},
    {"enum": ["x" * number for number in range(300)]},
    {"type": "object", "properties": {"\0": {}, "": {}, "\ud800": {}}},
    {"x-guidance": {"lenient": True}, "not": {}},
    _NESTED,
]
REGEXES = [
    "",
    "a",
    ".*",
    "(a{1,1000}){1,1000}",
    "[^a]{0,100000}",
    "(x+x+)+y",
    "(.*a){30}",
    "[^\\s\\S]",
    "\\0",
    "a\\b",
    "^a$",
    "(" * 500,
    "\0",
    "\\p{Greek}+",
    "(?i)é",
    "a{9999999}",
    "((a{100}){100}){100}",
    "x" * 20000,
]
GRAMMARS = [
    "",
    "start: start",
    'start: e\ne: e e | "a"',
    "start: <|no|>",
    "start: <|im_end|>",
    "start: /(/",
    "root ::= root",
    'root ::= "a"+',
    'start: "a"{1000000}',
    "%llguidance {}",
    '{"grammars": []}',
    '{"grammars": [{"lark_grammar": "start: \\"a\\""}]}',
    "start: @other",
    "start: gen\ngen[max_tokens=3]: /.*/",
    "start: " + "(" * 2000,
    "start: x\nx: " + " | ".join(f'"{number}"' for number in range(3000)),
]

SHARED: dict[str, list[Any]] = {
    "n": [*WHOLE, 3, 16385],
    "temperature": REAL,
    "top_p": [*REAL, 0.9999999999, 1.0000001],
    "top_k": [*WHOLE, VOCAB_SIZE - 1, VOCAB_SIZE, VOCAB_SIZE + 1],
    "min_p": [*REAL, 0.9999999999],
    "seed": [*WHOLE, -(2**62)],
    "presence_penalty": [*REAL, -2.0, -2.1],
    "frequency_penalty": [*REAL, -2.0, -2.1],
    "repetition_penalty": [*REAL, 1e30, 1e-30],
    "logit_bias": BIASES,
    "stop": [*TEXTS, *WORD_LISTS],
    "stop_token_ids": TOKEN_LISTS,
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
    "min_tokens": [*WHOLE, 3, 4],
    "max_tokens": [*WHOLE, 3, 500],
    "allowed_token_ids": TOKEN_LISTS,
    "bad_words": WORD_LISTS,
    "prompt_logprobs": [*WHOLE, 20, 21],
    "skip_special_tokens": FLAG,
    "spaces_between_special_tokens": FLAG,
    "truncate_prompt_tokens": [*WHOLE, 3],
    "truncation_side": ["left", "right", "middle"],
    "stream": FLAG,
    "stream_options": [
        None,
        {},
        {"include_usage": True},
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": 2},
    ],
    "stream_interval": WHOLE,
    "return_token_ids": FLAG,
    "return_tokens_as_token_ids": FLAG,
    "echo": FLAG,
    "priority": WHOLE,
    "request_id": [*TEXTS, "a:1", "u#1", "../x"],
    "cache_salt": [*TEXTS, "a/b"],
    "user": TEXTS,
    "model": ["", "nobody", 3, Raw('"\\udfff"')],
    "response_format": [
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema"},
        {"type": "x"},
        {},
        1,
        [],
        *({"type": "json_schema", "json_schema": {"schema": schema}} for schema in SCHEMAS),
        {"type": "structural_tag", "structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["<"]},
        {"type": "structural_tag", "structures": [], "triggers": []},
    ],
    "structured_outputs": [
        {},
        {"choice": []},
        {"choice": ["\0", '\n"', "\ud7ff", "x" * 5000]},
        {"json_object": True},
        {"json": True},
        {"json": "{"},
        *({"regex": regex} for regex in REGEXES),
        *({"grammar": grammar} for grammar in GRAMMARS),
        {"json": {}, "whitespace_pattern": "("},
        {"json": {}, "whitespace_pattern": ""},
        {"json": {}, "disable_any_whitespace": True},
        {"structural_tag": "{}"},
        {"structural_tag": {"structures": [3], "triggers": "a"}},
        {"regex": "a", "choice": ["b"]},
    ],
    "use_beam_search": FLAG,
    "logprob_token_ids": TOKEN_LISTS,
    "thinking_token_budget": WHOLE,
}
COMPLETION: dict[str, list[Any]] = SHARED | {
    "prompt": [
        *TEXTS,
        *TOKEN_LISTS,
        ["a", "b"],
        [[1], [2]],
        [[]],
        [[1], []],
        ["a", 1],
        ["a", ""],
        ["a"] * 40,
        [[COMMA] * 700],
        [COMMA] * 255,
        [COMMA] * 256,
    ],
    "logprobs": [*WHOLE, 20, 21],
    "add_special_tokens": FLAG,
    "suffix": TEXTS,
    "prompt_embeds": [None, "", [1.0]],
}
CHAT: dict[str, list[Any]] = SHARED | {
    "messages": [
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "", "content": ""}],
        [{"role": "user", "content": None}],
        [{"role": "assistant", "content": "a"}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": []}],
        *([{"role": "user", "content": text}] for text in TEXTS),
        *([{"role": text, "content": "a"}] for text in TEXTS),
    ],
    "logprobs": FLAG,
    "top_logprobs": [*WHOLE, 20, 21],
    "max_completion_tokens": [*WHOLE, 3],
    "add_generation_prompt": FLAG,
    "continue_final_message": FLAG,
    "chat_template": [
        "",
        "{{",
        "{{ messages[0].content }}",
        "{% for i in range(10**9) %}a{% endfor %}",
        "{{ raise_exception('x') }}",
    ],
    "chat_template_kwargs": [{}, {"messages": []}, {"x": {"y": [1]}}],
    "documents": [[], [{}], [{"text": "a"}]],
    "tools": [[], [{}], [{"type": "function", "function": {"name": "f"}}]],
    "tool_choice": ["none", "auto", "required", {}, "x"],
    "reasoning_effort": ["none", "max", "x"],
    "return_prompt_text": FLAG,
}
ENDPOINTS = {
    "/v1/completions": (COMPLETION, {"prompt": "a b c", "max_tokens": 3}),
    "/v1/chat/completions": (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}),
}


@dataclass(frozen=True)
class Extreme:
    """One request."""

    path: str
    body: str
    leaves_after: float | None = None  # seconds after which its client is gone


# Each leaves no token to sample: at once, while ends are held back, after the first token, after two.
NOTHING_TO_SAMPLE = [
    Extreme("/v1/completions", to_json({"prompt": "a b c", "max_tokens": 8, **fields}))
    for fields in (
        {"allowed_token_ids": [COMMA], "bad_words": [","]},
        {"allowed_token_ids": [EOS], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [33, 34], "bad_words": ["11", "12", "21", "22"]},
        {"allowed_token_ids": [33], "bad_words": ["111"]},
    )
]


class Extremes:
    """An endless supply: the same seed, the same requests."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)

    def __iter__(self) -> Extremes:
        return self

    def __next__(self) -> Extreme:
        dice = self._dice
        path, (fields, base) = dice.choice(list(ENDPOINTS.items()))
        body: dict[str, Any] = dict(base)
        for name in dice.sample(sorted(fields), dice.choice([2, 2, 2, 3])):
            body[name] = dice.choice(ODD) if dice.random() < 0.1 else dice.choice(fields[name])
        if dice.random() < 0.3:
            body["stream"] = True
        return Extreme(path, to_json(body), dice.uniform(0, 0.3) if dice.random() < 0.05 else None)
