"""Stop strings against a plain search over the whole text, however the text is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.text.stop_strings import StopMatch, StopMatcher

WORDS = st.lists(st.text("ab<", min_size=1, max_size=4), max_size=4)
PIECES = st.lists(st.text("ab<x", max_size=5), max_size=12)


def run(stop: list[str], pieces: list[str], include: bool = False, unarmed: int = 0) -> tuple[str, str | None]:
    """The text shown and the stop string that ended it; the first `unarmed` pieces do not count."""
    matcher = StopMatcher(stop, include)
    shown = ""
    for place, piece in enumerate(pieces):
        result = matcher.push(piece, armed=place >= unarmed)
        if isinstance(result, StopMatch):
            return shown + result.text, result.stop
        shown += result
    return shown + matcher.flush(), None


def search(stop: list[str], text: str, include: bool, after: int = 0) -> tuple[str, str | None]:
    """The definition: the match that is complete first, but behind character `after`; ties by list order."""
    for end in range(after + 1, len(text) + 1):
        for word in stop:
            if text[:end].endswith(word):
                return text[: end if include else end - len(word)], word
    return text, None


@given(WORDS, PIECES, st.booleans())
def test_any_cut_gives_what_a_search_gives(stop: list[str], pieces: list[str], include: bool) -> None:
    assert run(stop, pieces, include) == search(stop, "".join(pieces), include)


@given(WORDS, PIECES, st.integers(0, 6))
def test_matches_that_end_too_early_do_not_count(stop: list[str], pieces: list[str], unarmed: int) -> None:
    after = len("".join(pieces[:unarmed]))
    assert run(stop, pieces, True, unarmed) == search(stop, "".join(pieces), True, after)


@given(WORDS, PIECES)
def test_nothing_is_held_but_what_may_still_match(stop: list[str], pieces: list[str]) -> None:
    matcher = StopMatcher(stop)
    shown = text = ""
    for piece in pieces:
        text += piece
        result = matcher.push(piece)
        if isinstance(result, StopMatch):
            return
        shown += result
        held = text[len(shown) :]
        assert text.startswith(shown)
        assert not held or any(word.startswith(held) and word != held for word in stop)


@pytest.mark.parametrize(
    ("stop", "pieces", "expected"),
    [
        (["END"], ["a E", "N", "D b"], ("a ", "END")),
        (["</s>"], ["x<", "/", "s", ">"], ("x", "</s>")),
        (["</s>"], ["x<", "/", "p>"], ("x</p>", None)),
        (["bc", "abc"], ["abc"], ("a", "bc")),
        (["abc", "bc"], ["abc"], ("", "abc")),
        (["abcd", "bc"], ["ab", "cd"], ("a", "bc")),
        (["\n\n"], ["a\n", "\nb"], ("a", "\n\n")),
    ],
)
def test_worked_examples_are_matched(stop: list[str], pieces: list[str], expected: tuple[str, str | None]) -> None:
    assert run(stop, pieces) == expected


def test_long_stop_strings_cost_no_more_than_short_ones() -> None:
    """A search for prefixes at every piece would take minutes."""
    word = "a" * 16_000 + "b"
    matcher = StopMatcher([word, "a" * 8000 + "c"])
    shown = "".join(str(matcher.push(piece)) for piece in ["a" * 20_000, *["aa"] * 2000, "x", "end"])
    assert shown + matcher.flush() == "a" * 24_000 + "xend"
    assert matcher.push(word) == StopMatch(word, "")


def test_held_text_is_shown_at_the_end() -> None:
    matcher = StopMatcher(["STOP"])
    assert matcher.push("do not ST") == "do not "
    assert matcher.flush() == "ST"
