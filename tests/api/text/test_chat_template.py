"""Chat templates render as transformers renders them."""

from __future__ import annotations

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from api.errors import BadRequest
from api.text.chat_template import ChatTemplate, Message

CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TRIMMING = "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}{{ eos_token }}{% endfor %}"
ODD = """
{%- for message in messages %}
    {% if message.role == 'skip' %}{% continue %}{% endif %}
    {% if loop.index > 3 %}{% break %}{% endif %}
    {% generation %}{{ message | tojson }}{% endgeneration %}
    {{ [1, {'a': '<é>'}] | tojson(indent=1) }}
{%- endfor %}
"""
TALK: list[Message] = [
    {"role": "system", "content": "Be <brief>."},
    {"role": "user", "content": " Hi & bye "},
    {"role": "assistant", "content": "So it  "},
]


@pytest.mark.parametrize("source", [CHATML, TRIMMING, ODD])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_as_transformers(source: str, add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=add_generation_prompt, eos_token="</s>")
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(TALK, add_generation_prompt) == expected[0]


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_continue_final_message_as_transformers(source: str) -> None:
    expected, _ = render_jinja_template([TALK], chat_template=source, continue_final_message=True, eos_token="</s>")
    template = ChatTemplate(source, {"eos_token": "</s>"})
    assert template.render(TALK, add_generation_prompt=False, continue_final_message=True) == expected[0]


def test_a_template_that_drops_the_final_message() -> None:
    with pytest.raises(BadRequest, match="does not appear"):
        ChatTemplate("{{ messages[0].content }}").render(TALK, False, True)


def test_the_templates_own_word_is_the_error() -> None:
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(BadRequest, match=r"^Conversation roles must alternate$") as caught:
        template.render(TALK)
    assert caught.value.status == 400


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages.nope.nope }}", "{{ messages | sum }}", "{{ ''.__class__ + 1 }}"])
def test_what_breaks_inside_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(source).render(TALK)


def test_a_template_that_is_none() -> None:
    with pytest.raises(BadRequest, match="not valid"):
        ChatTemplate("{% for %}")


def test_variables_of_the_request() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ strftime_now('%Y') | length }}", {"enable_thinking": False})
    assert template.render(TALK, extra={"enable_thinking": True}) == "True4"
    with pytest.raises(BadRequest, match="chat_template_kwargs"):
        template.render(TALK, extra={"messages": []})


@pytest.mark.parametrize(
    ("source", "takes_parts"),
    [
        (CHATML, False),
        ("{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}", True),
        ("{% for m in messages %}{% set c = m['content'] %}{% for part in c %}{{ part }}{% endfor %}{% endfor %}", True),
    ],
)
def test_whether_content_is_taken_in_parts(source: str, takes_parts: bool) -> None:
    assert ChatTemplate(source).takes_parts is takes_parts
