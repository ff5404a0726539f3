"""The output items of a response, which its text becomes while it comes: messages, reasoning, calls of functions.

Each change is an event. Events depend on the outputs of a choice one by one, each of which is a token's: the same tokens make the
same events at any API server, however late they come.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from api.request.response_items import Item, item_id
from api.response.message_parts import MessageReader
from api.response.output_processor import ChoiceOutput, TokenLogprobs

Event = tuple[str, dict[str, Any]]  # its type behind "response.", and its members
Shown = Callable[[Sequence[TokenLogprobs]], Any]


class _OpenItem:
    """The item that is being written. It grows by text: of its one part, or a call's arguments."""

    def __init__(self, item: Item, place: int, part: Item | None, kind: str) -> None:
        self.item = item
        self.where = {"item_id": item["id"], "output_index": place}
        if part is not None:
            self.where["content_index"] = 0
        self.part = part  # empty; None: it has no parts
        self.kind = kind  # of its events of text
        self.texts: list[str] = []
        self.logprobs: list[TokenLogprobs] = []


class OutputItems:
    """`request_id`: what the ids of items are made of. `shown`: how logprobs are shown; None: they are not. `namespaces`: as of
    `api.request.response_tools`."""

    def __init__(
        self, reader: MessageReader, request_id: str, shown: Shown | None, namespaces: Mapping[str, tuple[str, str]] | None = None
    ) -> None:
        self._namespaces = namespaces or {}
        self.items: list[Item] = []  # done ones, and the open one as it began
        self._reader = reader
        self._request_id = request_id
        self._shown = shown
        self._untold: list[TokenLogprobs] = []  # of tokens that have told nothing yet
        self._open: _OpenItem | None = None
        self._calls: dict[int, _OpenItem] = {}  # by number

    def take(self, output: ChoiceOutput) -> list[Event]:
        """What the next output tells."""
        events: list[Event] = []
        if self._shown is not None:
            self._untold += output.logprobs
        for _, delta in self._reader.read(output):
            calls = delta.get("tool_calls", [])
            for part in calls:
                if "id" not in part:
                    self._grow(events, self._calls[part["index"]], part["function"]["arguments"])
            if reasoning := delta.get("reasoning"):
                self._write(events, "reasoning", reasoning)
            if content := delta.get("content"):
                self._write(events, "message", content)
            for part in calls:
                if "id" in part:
                    self._begin_call(events, part)
        return events

    def close(self, status: str) -> list[Event]:
        """The end of the item that is open. `status`: "completed" or "incomplete"."""
        events: list[Event] = []
        self._close(events, status)
        return events

    def _write(self, events: list[Event], type: str, text: str) -> None:
        """Text of a message or of reasoning."""
        if self._open is None or self._open.item["type"] != type:
            self._close(events)
            if type == "message":
                item: Item = {"type": type, "role": "assistant", "content": []}
                part: Item = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                opened = self._begin(events, item, part, "output_text")
            else:
                item = {"type": type, "summary": [], "content": []}
                opened = self._begin(events, item, {"type": "reasoning_text", "text": ""}, "reasoning_text")
            events.append(("content_part.added", {**opened.where, "part": dict(opened.part or {})}))
        assert self._open is not None
        self._grow(events, self._open, text)

    def _begin_call(self, events: list[Event], part: dict[str, Any]) -> None:
        self._close(events)
        self._untold.clear()
        name = part["function"]["name"]
        item = {"type": "function_call", "call_id": part["id"], "name": name, "arguments": ""}
        if name in self._namespaces:
            item["namespace"], item["name"] = self._namespaces[name]
        self._calls[part["index"]] = self._begin(events, item, None, "function_call_arguments")

    def _begin(self, events: list[Event], item: Item, part: Item | None, kind: str) -> _OpenItem:
        place = len(self.items)
        item = {"id": item_id(item["type"], self._request_id, str(place)), **item, "status": "in_progress"}
        self.items.append(item)
        events.append(("output_item.added", {"output_index": place, "item": item}))
        self._open = _OpenItem(item, place, part, kind)
        return self._open

    def _grow(self, events: list[Event], opened: _OpenItem, text: str) -> None:
        if not text:
            return
        opened.texts.append(text)
        more: dict[str, Any] = {}
        if opened.kind == "output_text":
            more["logprobs"] = self._shown(self._untold) if self._shown is not None else []
            opened.logprobs += self._untold
        self._untold.clear()
        events.append((f"{opened.kind}.delta", {**opened.where, "delta": text, **more}))

    def _close(self, events: list[Event], status: str = "completed") -> None:
        opened, self._open = self._open, None
        if opened is None:
            return
        text, item, more = "".join(opened.texts), opened.item, {}
        if opened.part is None:
            item = {**item, "arguments": text, "status": status}
            more = {"arguments": text, "name": item["name"]}
        else:
            part = {**opened.part, "text": text}
            more = {"text": text}
            if opened.kind == "output_text" and self._shown is not None:
                part["logprobs"] = more["logprobs"] = self._shown(opened.logprobs)
            elif opened.kind == "output_text":
                more["logprobs"] = []
            item = {**item, "content": [part], "status": status}
        events.append((f"{opened.kind}.done", {**opened.where, **more}))
        if opened.part is not None:
            events.append(("content_part.done", {**opened.where, "part": item["content"][0]}))
        events.append(("output_item.done", {"output_index": opened.where["output_index"], "item": item}))
        self.items[opened.where["output_index"]] = item
