"""The documents are plain to read: short sentences that name their actors (CONTRIBUTING.md, Prose)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops.settings import SETTINGS
from tests.docs.prose import ROOT, complaint, documents, sentences


@pytest.mark.parametrize("path", documents(), ids=lambda path: path.name)
def test_sentences_are_short_and_name_their_actors(path: Path) -> None:
    found = [f"{why}: {sentence}" for sentence in sentences(path.read_text()) if (why := complaint(sentence))]
    assert not found, f"{path.relative_to(ROOT)}:\n" + "\n".join(found)


@pytest.mark.parametrize("name", SETTINGS)
def test_help_texts_are_short_and_name_their_actors(name: str) -> None:
    found = [f"{why}: {part}" for part in SETTINGS[name].help.split("; ") if (why := complaint(part))]
    assert not found, "\n".join(found)


def test_a_sentence_is_found_across_lines_and_list_items() -> None:
    markdown = "# A heading. Left out\n\nOne `a b c`\nsentence. Two\n\n- three\n- four:\n\n| a | b. c |\n\n```sh\ncode. code\n```\n"
    assert list(sentences(markdown)) == ["One CODE sentence.", "Two", "three", "four:"]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("The engine ends the request.", ""),
        ("What waits is ended.", "begins with `What`"),
        ("What is a block?", ""),
        ("It is ended by whoever sees it.", "says `whoever` instead of naming the actor"),
        (" ".join(["word"] * 29) + ".", "29 words"),
    ],
)
def test_a_complaint_names_the_fault_of_a_sentence(sentence: str, expected: str) -> None:
    assert complaint(sentence) == expected
