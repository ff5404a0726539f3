"""Rules of a script: which one answers, what of the prompt an answer takes over, and what is wrong in a file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu.errors import UnsupportedConfiguration
from gpu.stand_in.conversation import Conversation
from gpu.stand_in.script import Script

WEATHER = r"""
- match: weather in (?P<city>\w+)
  answer:
    - '<tool_call>{"name": "weather", "arguments": {"city": "\1"}}</tool_call>'
    - 'In \g<city> \d+ is no group: \n {"a": "\""}'
- match: (\d+) degrees
  answer: It has \1.
- system: pirate
  answer: Arr!
- answer: What?
"""


def answer(script: str, *inputs: str, system: str = "", begun: str = "") -> str | None:
    return Script(script).answer(Conversation(system, list(inputs), begun))


def test_captures_are_put_in_and_all_else_stays_as_it_is() -> None:
    assert answer(WEATHER, "the weather in Rome, please") == (
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
    )
    assert answer(WEATHER, "weather in Rome", "sunny") == 'In Rome \\d+ is no group: \\n {"a": "\\""}'
    assert answer("- {match: 'a(b)?', answer: '<\\1>'}", "a") == "<>"


def test_json_may_write_a_character_as_two_escapes() -> None:
    script = json.dumps([{"match": "🌊", "answer": "a wave: 🌊"}])
    assert "\\ud83c\\udf0a" in script and answer(script, "what is 🌊?") == "a wave: 🌊"
    for wrong in ({"answer": "\ud83c"}, {"answer": "x", "match": "\udf0a"}):
        with pytest.raises(UnsupportedConfiguration, match="half a character"):
            Script(json.dumps([wrong]))


def test_the_last_match_counts() -> None:
    assert answer(WEATHER, "weather in Rome? No, the weather in Oslo") == answer(WEATHER, "weather in Oslo")


def test_a_rule_answers_the_inputs_that_follow_in_turn() -> None:
    assert answer(WEATHER, "weather in Rome", "well", "and then?") == "What?"
    assert answer(WEATHER, "weather in Rome", "weather in Oslo") == answer(WEATHER, "weather in Oslo")


def test_the_first_rule_that_has_an_answer_gives_it() -> None:
    assert answer(WEATHER, "weather in Rome at 20 degrees") == answer(WEATHER, "weather in Rome")
    assert answer(WEATHER, "20 degrees") == "It has 20."
    assert answer(WEATHER, "hello", system="You are a pirate.") == "Arr!"
    assert answer(WEATHER, "hello", system="You are helpful.") == "What?"
    assert answer("- {match: a, answer: b}", "c") is None


@pytest.mark.parametrize("begun", ["<think>\n", "\n<think>\n", "<think>"])
def test_what_the_prompt_has_of_an_answer_is_not_said_again(begun: str) -> None:
    said = answer(json.dumps([{"answer": "<think>\nHm.</think>\nYes"}]), "x", begun=begun)
    assert begun.lstrip() + (said or "") == "<think>\nHm.</think>\nYes"
    assert answer("- answer: 'No'", "x", begun=begun) == "No"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("- answer: [", "the script is no list of rules: while parsing"),
        ("answer: a", "the script is no list of rules: Expected `array`"),
        ("- answer: yes", r"Expected `str \| array`, got `bool` - at `\$\[0\].answer`"),
        ("- {answer: a, math: b}", r"unknown field `math`"),
        ("- match: a", r"missing required field `answer`"),
        ("- {answer: a}\n- {answer: b, match: '('}", "the script, rule 2: `match` is no regular expression: missing"),
        ("- {answer: a, system: '['}", "rule 1: `system` is no regular expression: unterminated"),
        (r"- {answer: '\2', match: '(a)'}", r"rule 1: its answer names the group \\2, which its `match` does not have"),
        (r"- {answer: '\g<b>', match: '(a)'}", r"its answer names the group \\g<b>, which"),
        ("- answer: []", "rule 1: it has no answer"),
    ],
)
def test_what_is_wrong_in_a_script(text: str, why: str) -> None:
    with pytest.raises(UnsupportedConfiguration, match=why):
        Script(text)


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedConfiguration, match=r"--script: .*missing\.yaml cannot be read"):
        Script.read(str(tmp_path / "missing.yaml"))
