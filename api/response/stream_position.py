"""How far a stream has got, as the `id:` of its events tells it; a client that continues the stream sends the last one back.

An id counts what its event and all before it told: opening events, tokens and characters of each choice, the closing event. So text
that is held back, because a stop string may come of it, is not lost: the server that continues the stream detokenizes from the
first token and leaves out what the client has.

    2-12.57_9.40.e-0    two opening events; choice 0: 12 tokens, 57 characters; choice 1: 9 tokens, 40 characters, and its end
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from api.errors import BadRequest
from api.response.output_processor import ChoiceOutput

_CHOICE = r"(?:\d{1,10}\.\d{1,10}(?:\.e)?)?"  # empty: nothing of it has been told
_ID = re.compile(rf"(\d{{1,6}})-({_CHOICE}(?:_{_CHOICE})*)-([01])")


@dataclass(slots=True)
class _ChoicePosition:
    begun: bool = False  # an event showed something of it
    ended: bool = False  # an event told its end
    num_tokens: int = 0
    num_characters: int = 0
    made_tokens: int = 0  # what this server has made of it, told or not
    made_characters: int = 0

    def __str__(self) -> str:
        if not self.begun and not self.ended:
            return ""
        return f"{self.num_tokens}.{self.num_characters}{'.e' if self.ended else ''}"


class StreamPosition:
    """What the client of a stream has been told, in this connection and in those before."""

    def __init__(self, num_choices: int) -> None:
        self.num_opened = 0  # opening events
        self.closed = False  # the closing event was told
        self._choices = [_ChoicePosition() for _ in range(num_choices)]

    @classmethod
    def parse(cls, text: str, num_choices: int) -> StreamPosition:
        """Raises BadRequest."""
        found = _ID.fullmatch(text)
        parts = found[2].split("_") if found is not None else []
        if found is None or len(parts) != num_choices:
            message = "Last-Event-ID and starting_after must be the id of an event of this stream."
            raise BadRequest(message, param="starting_after")
        position = cls(num_choices)
        position.num_opened, position.closed = int(found[1]), found[3] == "1"
        for choice, part in zip(position._choices, parts, strict=True):
            if part:
                tokens, characters, *end = part.split(".")
                choice.num_tokens, choice.num_characters, choice.ended = int(tokens), int(characters), bool(end)
                choice.begun = True
        return position

    def event_id(self) -> bytes:
        """The line of an event, as it stands now."""
        choices = "_".join(map(str, self._choices))
        return f"id: {self.num_opened}-{choices}-{int(self.closed)}\n".encode()

    def num_characters(self, index: int) -> int:
        """Of the choice's text, that the client has been told; its end counts as one where what was held back is told there."""
        return self._choices[index].num_characters

    def has_begun(self, index: int) -> bool:
        return self._choices[index].begun

    def untold(self, output: ChoiceOutput) -> ChoiceOutput:
        """The part of an output that the client does not have. Outputs of a choice come here in order, from its first one on."""
        choice = self._choices[output.index]
        tokens = max(0, choice.num_tokens - choice.made_tokens)
        characters = max(0, choice.num_characters - choice.made_characters)
        choice.made_tokens += len(output.token_ids)
        choice.made_characters += len(output.text)
        if not tokens and not characters and not choice.ended:
            return output
        return ChoiceOutput(
            output.index,
            output.text[characters:],
            output.token_ids[tokens:],
            output.logprobs[tokens:],
            None if choice.ended else output.finish_reason,
            output.stop_reason,
        )

    def tell(self, output: ChoiceOutput, shown: bool, num_characters: int | None = None) -> None:
        """The client has been told this part. `shown`: in an event, not only because it shows nothing. `num_characters`: of the
        choice's text; None: all that was made."""
        choice = self._choices[output.index]
        choice.begun = choice.begun or shown
        choice.num_tokens = max(choice.num_tokens, choice.made_tokens)
        choice.num_characters = max(choice.num_characters, choice.made_characters if num_characters is None else num_characters)

    def tell_part(self, index: int, num_characters: int) -> None:
        """The client has been told so many characters of the part of the choice's answer that is open."""
        self._choices[index].begun = True
        self._choices[index].num_characters = num_characters

    def has_ended(self, index: int) -> bool:
        return self._choices[index].ended

    def tell_end(self, index: int) -> None:
        self._choices[index].ended = True
