"""Markdown as sentences: what a reader of the documents has to read in one breath."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
LONGEST_SENTENCE = 28  # words; the aim is 25, and a few lists need more
VAGUE = re.compile(r"\b(whoever|whatever|somebody|someone|anybody|nobody|thereof|therein)\b", re.IGNORECASE)
VAGUE_OPENING = re.compile(r"(What|Who|Whose|Whom)\b(?!.*\?$)")

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
_NEW_BLOCK = re.compile(r"(#|\||[-*] |\d+\. )")
_END = re.compile(r"(?<=[.!?:])(?:\s+|$)")


def documents() -> list[Path]:
    """What people read: not the history, which is kept as it was written."""
    return sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])


def sentences(markdown: str) -> Iterator[str]:
    """The sentences outside code and tables, inline code as one word each. A colon ends a sentence."""
    text = _IMAGE.sub("", _COMMENT.sub("", _FENCE.sub("", markdown)))
    for block in _blocks(_CODE.sub("CODE", _LINK.sub(r"\1", text))):
        yield from (sentence for sentence in _END.split(block) if sentence)


def _blocks(text: str) -> Iterator[str]:
    """Paragraphs and list items, each on a line; headings and tables are left out."""
    block: list[str] = []
    for line in (*text.splitlines(), ""):
        stripped = line.strip()
        if block and (not stripped or _NEW_BLOCK.match(stripped)):
            yield " ".join(block)
            block = []
        if stripped and not stripped.startswith(("#", "|")):
            block.append(re.sub(r"^([-*] |\d+\. )", "", stripped))


def complaint(sentence: str) -> str:
    """What is wrong with a sentence; empty: nothing."""
    num_words = len(re.findall(r"\S*\w\S*", sentence))
    if num_words > LONGEST_SENTENCE:
        return f"{num_words} words"
    if found := VAGUE.search(sentence):
        return f"says `{found.group()}` instead of naming the actor"
    if found := VAGUE_OPENING.match(sentence.lstrip("*_(\"'")):
        return f"begins with `{found.group()}`"
    return ""
