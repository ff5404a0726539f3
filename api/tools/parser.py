"""Text that a model writes, taken apart into content and tool calls while it comes.

What a text has told after so many characters does not depend on how it was cut into pieces: the parser takes characters. So outputs
may be cut and merged on their way, and another API server can go on with a stream. A call is told once its name is there. What does
not parse before that is content, and so is the text behind a place where a call breaks off.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import NamedTuple

from api.tools.bodies import END, Mismatch, Reading, either, literal, read_call, visible
from api.tools.formats import Body, JsonBody, Listing, LiteralBody, MarkedBody, NamedBody, TaggedBody, ToolFormat

MOST_HELD = 2048  # characters of what may become a call: a call whose name comes later is none

ParameterTypes = Mapping[str, str]  # by parameter, as JSON schema calls them; "": not one type


class ToolDelta(NamedTuple):
    """What a text told when `position` characters of it were there; its end counts as one."""

    position: int
    call: int  # number of the call; -1: the text is content
    name: str | None  # of a call that begins here; it tells no text
    text: str  # content, or a piece of the call's arguments, JSON


class ToolParser:
    """`tools`: those that the request offers. `one_call`: calls behind the first are left out."""

    def __init__(self, format: ToolFormat, tools: Mapping[str, ParameterTypes], one_call: bool = False) -> None:
        self._format = format
        self._tools = tools
        self._one_call = one_call
        self._opening = format.opening
        self._position = 0  # characters taken
        self._call = -1  # number of the call that is read, or was read last
        self._begun_at = -1  # position of that call's beginning
        self._deltas: list[ToolDelta] = []
        self._late: list[str] = []  # arguments that were there with the name: they are told with the next character
        self._queue: deque[str] = deque()  # characters to read, again or for the first time
        self._last = ""  # read
        self._held: list[str] | None = None  # characters of what may become a call; None: what is read is told
        self._num_sure = 0  # of those, the first ones that are content if it does not
        self._blanks: list[str] = []  # that belong to the content if more of it follows
        self._behind_call = False  # no content since the last call
        self._in_content = False
        self._machine = self._run()
        next(self._machine)

    @property
    def num_calls(self) -> int:
        """Calls told so far."""
        return min(self._call + 1, 1) if self._one_call else self._call + 1

    def feed(self, text: str) -> list[ToolDelta]:
        """What `text` adds."""
        place = 0
        if self._in_content and self._held is None and not self._late:
            mark = text.find(self._opening[0]) if self._opening else -1
            plain = (text if mark < 0 else text[:mark]).rstrip()
            if plain:
                place = len(plain)
                self._position += place
                self._tell_content(plain)
        for character in text[place:]:
            self._take(character)
        return self._told()

    def finish(self) -> list[ToolDelta]:
        """The text has ended: what was held back."""
        self._take(END)
        self._tell_late()
        return self._told()

    def _take(self, character: str) -> None:
        self._position += 1
        self._tell_late()
        self._queue.append(character)
        while self._queue:
            self._last = self._queue.popleft()
            if self._held is not None:
                self._held.append(self._last)
                if len(self._held) > MOST_HELD:
                    self._machine.throw(Mismatch())
                    continue
            self._machine.send(self._last)

    # What is told

    def _tell_content(self, text: str) -> None:
        self._behind_call = False
        self._deltas.append(ToolDelta(self._position, -1, None, "".join(self._blanks) + text))
        self._blanks.clear()

    def _tell_late(self) -> None:
        if self._late:
            late = "".join(self._late)
            self._late.clear()
            self.write(late)

    def _told(self) -> list[ToolDelta]:
        """The deltas since the last time; pieces of one text are one."""
        told: list[ToolDelta] = []
        parts: list[str] = []
        for delta in self._deltas:
            if told and delta.name is None and told[-1].name is None and told[-1].call == delta.call:
                parts.append(delta.text)
                told[-1] = told[-1]._replace(position=delta.position)
                continue
            if told:
                told[-1] = told[-1]._replace(text="".join(parts))
            told.append(delta)
            parts = [delta.text]
        if told:
            told[-1] = told[-1]._replace(text="".join(parts))
        self._deltas.clear()
        return told

    # What the readers of calls say

    def begin(self, name: str) -> None:
        """A call's name is there. Raises Mismatch where it cannot be one."""
        if not name or (name not in self._tools and not self._opening):
            raise Mismatch
        self._held = None
        self._blanks.clear()
        self._behind_call = True
        self._call += 1
        self._begun_at = self._position
        if not self._is_muted:
            self._deltas.append(ToolDelta(self._position, self._call, name, ""))

    def write(self, text: str) -> None:
        """Arguments of the call."""
        if self._is_muted or not text:
            return
        if self._begun_at == self._position:
            self._late.append(text)
        else:
            self._deltas.append(ToolDelta(self._position, self._call, None, text))

    @property
    def _is_muted(self) -> bool:
        return self._one_call and self._call > 0

    def unread(self, text: str) -> None:
        """The last characters, which these are, are to be read again."""
        self._queue.extendleft(reversed(text) if text else [END])
        if self._held is not None:
            del self._held[-max(1, len(text)) :]

    def types(self, name: str) -> ParameterTypes:
        return self._tools.get(name, {})

    # The text

    def _run(self) -> Reading[None]:
        is_start = True
        while True:
            try:
                if is_start and not self._opening:
                    is_start = False
                    yield from self._prefix()
                else:
                    yield from self._content()
                yield from self._group()
            except Mismatch:
                self._give_up()

    def _give_up(self) -> None:
        """What was held is no call: content, which is read again. A call that was told breaks off before the last character."""
        if self._held is None:
            self._queue.appendleft(self._last)
            return
        held, self._held = self._held, None
        sure = "".join(held[: self._num_sure])
        self._queue.extendleft(reversed(held[self._num_sure :]))
        if sure:
            self._tell_content(sure)

    def _hold(self, num_sure: int) -> None:
        """From here on it may become a call. `num_sure`: of characters that are content if it does not, the last read is one."""
        self._held = [self._last] * num_sure
        self._num_sure = num_sure

    def _content(self) -> Reading[None]:
        """Up to behind an opening."""
        self._in_content, self._held = True, None
        while True:
            character = yield
            if character.isspace():
                self._blanks.append(character)
            elif character == END:
                if self._blanks and not self._behind_call:
                    self._tell_content("")
            elif self._opening and character == self._opening[0]:
                self._in_content = False
                self._hold(1)
                yield from literal(self._opening[1:])
                return
            else:
                self._tell_content(character)

    def _prefix(self) -> Reading[None]:
        """Up to the first visible character of a text that may begin with a call."""
        self._hold(0)
        first = yield from visible()
        if first and self._format.prefix.startswith(first):
            yield from literal(self._format.prefix[1:])
        else:
            self.unread(first)

    def _group(self) -> Reading[None]:
        """The calls of a group, to behind its closing. Where that is missing, its text is read as content."""
        format = self._format
        first = yield from visible()
        is_list = first == "[" and format.listing is not Listing.NEVER
        if is_list:
            first = yield from visible()
        elif format.listing is Listing.ALWAYS:
            raise Mismatch
        while True:
            body = self._body(first)
            yield from read_call(body, self, first, format.closing)
            self._hold(0)
            first = yield from visible()
            if is_list and first == "]":
                self._hold(0)
                yield from self._end((yield from visible()))
                return
            if first == format.separator != "" and (is_list or format.listing is Listing.NEVER):
                first = yield from visible()
            elif is_list:
                raise Mismatch
            else:
                following = body.before_name if isinstance(body, TaggedBody) else ""
                if (yield from self._end(first, following)):
                    return
                self.unread(following)
                first = yield

    def _end(self, first: str, following: str = "") -> Reading[bool]:
        """The closing, whose first character was read. False: it is `following` instead."""
        closing = self._format.closing
        if not closing:
            raise Mismatch
        found = yield from either(first, closing, following)
        if found == closing:
            self._held = None
        return found == closing

    def _body(self, first: str) -> Body:
        """The body that a call begins whose first character this is."""
        for body in (self._format.body, *self._format.other_bodies):
            match body:
                case JsonBody():
                    fits = first == "{"
                case NamedBody() | LiteralBody():
                    fits = first.isidentifier()
                case TaggedBody():
                    fits = first == body.before_name[0] if body.before_name else first.isidentifier()
                case MarkedBody():
                    fits = first == body.before_name[0]
            if fits:
                return body
        raise Mismatch
