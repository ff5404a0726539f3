"""Prompts to token ids: content parts, truncation, lengths."""

from __future__ import annotations

from typing import Any

import pytest

from api.errors import BadRequest
from api.request.prompts import (
    Prompt,
    Truncation,
    check_truncation,
    checked,
    completion_prompts,
    num_prompts,
    render_chat,
    tokenize_text,
)
from api.request.sampling_params import ModelLimits
from api.request.schemas import TemplateFields
from api.text.chat_template import ChatTemplate
from api.text.tokenizer import TextTokenizer

LIMITS = ModelLimits(max_model_len=10, vocab_size=100, max_logprobs=20)
PLAIN = ChatTemplate("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
PARTS = ChatTemplate(
    "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.type }} {{ p.text }}]{% endfor %}{% endfor %}"
)


def render(template: ChatTemplate, *messages: dict[str, Any]) -> str:
    return render_chat(TemplateFields.model_validate({"messages": list(messages)}), template, {})


def test_content_is_rendered_in_the_form_that_the_template_takes() -> None:
    parts = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
    assert render(PLAIN, parts, {"role": "assistant", "content": None}) == "<user>a\nb<assistant>"
    assert render(PARTS, parts, {"role": "user", "content": "c"}) == "<user>[text a][text b]<user>[text c]"


KNOWN_ROLES = ChatTemplate(
    "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
)
USERS_ALONE = ChatTemplate("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")


def test_a_developer_is_the_system_to_templates_that_know_no_developer() -> None:
    talk = {"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}
    assert render(KNOWN_ROLES, *talk) == "<system>Be brief.<user>Hi"
    assert render(PLAIN, *talk) == "<developer>Be brief.<user>Hi"
    assert render(KNOWN_ROLES, talk[1], talk[0]) == "<user>Hi<system>Be brief."
    with pytest.raises(BadRequest, match="does not take messages of the role 'developer'"):
        render(USERS_ALONE, *talk)


def test_a_role_that_the_template_leaves_out_is_refused() -> None:
    talk = {"role": "usr", "content": "Hi"}
    assert render(PLAIN, talk) == "<usr>Hi"
    with pytest.raises(BadRequest, match="does not take messages of the role 'usr'"):
        render(KNOWN_ROLES, talk)
    refusing = ChatTemplate("{{ raise_exception('Only user and assistant!') }}")
    with pytest.raises(BadRequest, match="Only user and assistant!"):
        render(refusing, talk)


def test_a_template_may_take_text_for_one_role_and_parts_for_another() -> None:
    source = "[SYS {{ messages[0].content|trim }}]{% for m in messages[1:] %}{% if m.content is string %}{{ m.content }}{% else %}"
    template = ChatTemplate(source + "{% for p in m.content %}({{ p.text }}){% endfor %}{% endif %}{% endfor %}")
    system, parts = {"role": "system", "content": "Be brief."}, [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render(template, system, {"role": "user", "content": "Hi"}) == "[SYS Be brief.]Hi"
    assert render(template, {"role": "system", "content": parts}, {"role": "user", "content": "Hi"}) == "[SYS a\nb]Hi"


def test_arguments_of_calls_are_objects_for_the_template() -> None:
    template = ChatTemplate("{{ messages[0].tool_calls[0].function.arguments.city }}")
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"city": "Bonn"}'}}
    assert render(template, {"role": "assistant", "content": None, "tool_calls": [call]}) == "Bonn"


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        (Truncation(3), [5, 6, 7]),
        (Truncation(3, "right"), [1, 2, 3]),
        (Truncation(9), [1, 2, 3, 4, 5, 6, 7]),
        (Truncation(None), [1, 2, 3, 4, 5, 6, 7]),
    ],
)
def test_truncation_keeps_the_wanted_end(truncation: Truncation, expected: list[int]) -> None:
    assert checked(Prompt([1, 2, 3, 4, 5, 6, 7]), LIMITS, truncation).token_ids == expected


def test_truncation_to_what_fits_leaves_room_for_a_token() -> None:
    assert checked(Prompt(list(range(50))), LIMITS, Truncation(-1)).token_ids == list(range(41, 50))


def test_a_truncated_prompt_is_echoed_as_it_is() -> None:
    assert checked(Prompt([1, 2, 3], "abc"), LIMITS, Truncation(2)).text is None


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([], "cannot be empty"),
        ([100], "out of vocabulary"),
        ([1] * 10, "maximum context length is 10 tokens.*contains 10 input tokens"),
    ],
)
def test_impossible_prompts_are_refused(token_ids: list[int], message: str) -> None:
    with pytest.raises(BadRequest, match=message):
        checked(Prompt(token_ids), LIMITS)


def test_a_text_that_cannot_fit_is_refused_untokenized(tokenizer: TextTokenizer) -> None:
    text = "x" * (10 * tokenizer.max_chars_per_token + 1)
    with pytest.raises(BadRequest, match="characters") as caught:
        tokenize_text(text, tokenizer, LIMITS, True)
    assert caught.value.param == "input_text"


def test_truncation_beyond_the_context_is_refused() -> None:
    with pytest.raises(BadRequest, match="truncate_prompt_tokens=11 cannot be greater"):
        check_truncation(11, LIMITS)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]]), ("", [""])],
)
def test_prompts_come_as_text_token_ids_or_lists_of_these(prompt: Any, expected: list[Any]) -> None:
    assert completion_prompts(prompt) == expected


@pytest.mark.parametrize(
    ("prompt", "count"), [(None, 0), ("", 0), ([], 0), ("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1], [2, 3]], 2)]
)
def test_prompts_are_counted(prompt: Any, count: int) -> None:
    assert num_prompts(prompt) == count


@pytest.mark.parametrize("prompt", [None, []])
def test_a_missing_or_empty_prompt_is_refused(prompt: Any) -> None:
    with pytest.raises(BadRequest):
        completion_prompts(prompt)
