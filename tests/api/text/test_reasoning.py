"""Reasoning and content are told apart, whatever the pieces that the text comes in."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text.reasoning import REASONING_FORMATS, ReasoningSplitter, reasoning_format_of_template

THINK = REASONING_FORMATS["think"]


def split(pieces: list[str], is_open: bool) -> tuple[str, str]:
    splitter = ReasoningSplitter(THINK, is_open)
    reasoning = content = ""
    for piece in pieces:
        if splitter.is_done:
            content += piece
        else:
            more, rest = splitter.feed(piece)
            reasoning, content = reasoning + more, content + rest
    if not splitter.is_done:
        more, rest = splitter.finish()
        reasoning, content = reasoning + more, content + rest
    else:
        assert splitter.num_taken == sum(map(len, pieces)) - len(content)
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm,  so.\n</think>\n\nYes. ", False, "Hm,  so.", "Yes. "),
        ("\nHm </ so.</think>Yes</think>", True, "Hm </ so.", "Yes</think>"),
        ("Hm </thi", True, "Hm </thi", ""),
        ("Hm \n", True, "Hm", ""),
        (" Yes <think>", False, "", " Yes <think>"),
        (" <thin", False, "", " <thin"),
        ("<think></think>", False, "", ""),
        ("<think>a</think>\n", False, "a", ""),
        ("", True, "", ""),
    ],
)
def test_reasoning_and_content(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert split([text], is_open) == (reasoning, content)
    assert split(list(text), is_open) == (reasoning, content)


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<", "</th", "\n", " ", "a", "b c"]), max_size=8).map("".join),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)
def test_no_cut_changes_it(text: str, places: list[int], is_open: bool) -> None:
    places = sorted(min(place, len(text)) for place in places)
    pieces = [text[begin:end] for begin, end in zip([0, *places], [*places, len(text)], strict=True)]
    assert split(pieces, is_open) == split([text], is_open)


def test_a_template_tells_its_format() -> None:
    assert reasoning_format_of_template("{{ content.split('</think>') }}") == "think"
    assert reasoning_format_of_template("[THINK]x[/THINK]") == "mistral"
    assert reasoning_format_of_template("plain") == ""
