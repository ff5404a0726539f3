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
def test_rendering_equals_transformers(source: str, add_generation_prompt: bool) -> None:
    expected, _ = render_jinja_template([TALK], chat_template=source, add_generation_prompt=add_generation_prompt, eos_token="</s>")
    assert ChatTemplate(source, {"eos_token": "</s>"}).render(TALK, add_generation_prompt) == expected[0]


@pytest.mark.parametrize("source", [CHATML, TRIMMING])
def test_continue_final_message_equals_transformers(source: str) -> None:
    expected, _ = render_jinja_template([TALK], chat_template=source, continue_final_message=True, eos_token="</s>")
    template = ChatTemplate(source, {"eos_token": "</s>"})
    assert template.render(TALK, add_generation_prompt=False, continue_final_message=True) == expected[0]


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    with pytest.raises(BadRequest, match="does not appear"):
        ChatTemplate("{{ messages[0].content }}").render(TALK, False, True)


def test_the_error_is_the_message_that_the_template_raises() -> None:
    template = ChatTemplate("{{ raise_exception('Conversation roles must alternate') }}")
    with pytest.raises(BadRequest, match=r"^Conversation roles must alternate$") as caught:
        template.render(TALK)
    assert caught.value.status == 400


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{{ messages.nope.nope }}", "{{ messages | sum }}", "{{ ''.__class__ + 1 }}"])
def test_a_template_that_fails_is_a_bad_request(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(source).render(TALK)


def test_a_template_with_a_syntax_error_is_a_bad_request() -> None:
    with pytest.raises(BadRequest, match="not valid"):
        ChatTemplate("{% for %}")


def test_variables_of_the_request_override_defaults_but_not_messages() -> None:
    template = ChatTemplate("{{ enable_thinking }}{{ strftime_now('%Y') | length }}", {"enable_thinking": False})
    assert template.render(TALK, extra={"enable_thinking": True}) == "True4"
    with pytest.raises(BadRequest, match="chat_template_kwargs"):
        template.render(TALK, extra={"messages": []})


LOOP = "{% for part in m.content %}{{ part.text }}{% endfor %}"
EACH = "{%% for m in messages %%}<{{ m.role }}>%s{%% endfor %%}"
BY_ROLE = "{% if m.role == 'tool' %}" + LOOP + "{% else %}{{ m.content }}{% endif %}"
EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}"


@pytest.mark.parametrize(
    ("source", "role", "is_first", "text", "parts"),
    [
        (CHATML, "user", False, True, False),
        (TRIMMING, "system", True, True, False),
        (EACH % LOOP, "user", True, False, True),
        (EACH % ("{% set c = m['content'] %}" + LOOP.replace("m.content", "c")), "user", False, False, True),
        (EACH % EITHER, "user", False, True, True),
        (EACH % BY_ROLE, "tool", False, False, True),
        (EACH % BY_ROLE, "user", False, True, False),
        (EACH % "{{ 'A ' + m.content }}", "user", True, True, False),
        (EACH % "{{ m.content | tojson }}", "user", True, True, False),
        ("[SYS {{ messages[0].content|trim }}]{% for m in messages[1:] %}" + EITHER + "{% endfor %}", "system", True, True, False),
        ("[SYS {{ messages[0].content|trim }}]{% for m in messages[1:] %}" + EITHER + "{% endfor %}", "user", False, True, True),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}", "developer", True, False, False),
    ],
)
def test_the_form_of_content_is_probed(source: str, role: str, is_first: bool, text: bool, parts: bool) -> None:
    forms = ChatTemplate(source).forms(role, is_first)
    assert (forms.text, forms.parts, forms.raises) == (text, parts, False)


def test_templates_are_probed_for_content_none() -> None:
    branch = EACH % "{% if m.content is none %}-{% else %}{{ m.content }}{% endif %}"
    assert ChatTemplate(branch).forms("assistant", False).none
    assert not ChatTemplate(EACH % "{{ m.content }}").forms("assistant", False).none
    assert not ChatTemplate(EACH % "{{ 'A' + m.content }}").forms("assistant", False).none


def test_templates_are_probed_for_roles_that_they_refuse() -> None:
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + EACH % "{{ m.content }}"
    assert ChatTemplate(source).forms("system", True).raises
    assert not ChatTemplate(source).forms("user", True).raises


def test_the_memory_for_made_up_roles_is_bounded() -> None:
    template = ChatTemplate(CHATML)
    assert all(template.forms(f"role{number}", False).text for number in range(200))
    assert len(template._forms) == 64
