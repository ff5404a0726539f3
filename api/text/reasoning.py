"""Reasoning before an answer, which models write between marks. Told apart while the text comes, however it is cut into pieces."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ReasoningFormat:
    opening: str
    closing: str


REASONING_FORMATS = {
    "think": ReasoningFormat("<think>", "</think>"),
    "mistral": ReasoningFormat("[THINK]", "[/THINK]"),
}


def reasoning_format_of_template(source: str) -> str:
    """Name of the format that a chat template contains; "": none."""
    return next((name for name, format in REASONING_FORMATS.items() if format.closing in source), "")


class ReasoningCounter:
    """Counts the tokens up to the end of the reasoning, its marks among them."""

    def __init__(self, format: ReasoningFormat, is_open: bool) -> None:
        self._splitter = ReasoningSplitter(format, is_open)
        self._num_tokens = 0

    def feed(self, text: str) -> None:
        """The text of the next token, which may be empty."""
        if not self._splitter.is_closed:
            self._splitter.feed(text)
            self._num_tokens += 1

    @property
    def num_tokens(self) -> int:
        return self._num_tokens if self._splitter.has_reasoning else 0


class ReasoningSplitter:
    """`is_open`: the prompt ends with the opening. Blanks around the reasoning belong neither to it nor to the content."""

    def __init__(self, format: ReasoningFormat, is_open: bool) -> None:
        self.num_taken = 0  # characters that are reasoning, marks and blanks
        self.is_done = False  # all that follows is content
        self._format = format
        self._in_reasoning = is_open
        self._behind = False  # the closing was there
        self._told = False  # some reasoning
        self._held = ""  # characters that have told nothing yet

    @property
    def has_reasoning(self) -> bool:
        return self._in_reasoning or self._behind

    @property
    def is_closed(self) -> bool:
        """No reasoning comes any more."""
        return self._behind or self.is_done

    def feed(self, text: str) -> tuple[str, str]:
        """The reasoning that `text` adds, and the content behind it."""
        buffer, self._held = self._held + text, ""
        self.num_taken += len(text)
        reasoning = ""
        if not self._in_reasoning and not self._behind:
            visible = buffer.lstrip()
            if visible.startswith(self._format.opening):
                self._in_reasoning, buffer = True, visible[len(self._format.opening) :]
            elif self._format.opening.startswith(visible):
                self._held = buffer
                return "", ""
            else:
                return "", self._end(buffer)
        if self._in_reasoning:
            place = buffer.find(self._format.closing)
            if place < 0:
                return self._reasoning(buffer), ""
            reasoning, buffer = self._stripped(buffer[:place]), buffer[place + len(self._format.closing) :]
            self._in_reasoning, self._behind = False, True
        content = buffer.lstrip()
        return reasoning, self._end(content) if content else ""

    def finish(self) -> tuple[str, str]:
        """The text has ended: what was held back, reasoning and content."""
        held, self._held = self._held, ""
        return (self._stripped(held), "") if self._in_reasoning else ("", "" if self._behind else held)

    def _end(self, content: str) -> str:
        self.is_done = True
        self.num_taken -= len(content)
        return content

    def _reasoning(self, buffer: str) -> str:
        """What can be told of reasoning that goes on: not blanks or the closing's beginning at its end."""
        closing = self._format.closing
        num_partial = next(length for length in range(len(closing) - 1, -1, -1) if buffer.endswith(closing[:length]))
        told = self._stripped(buffer[: len(buffer) - num_partial])
        self._held = buffer[len(buffer[: len(buffer) - num_partial].rstrip()) :]
        return told

    def _stripped(self, text: str) -> str:
        text = text.rstrip() if self._told else text.strip()
        self._told = self._told or bool(text)
        return text
