"""What travels with a response's request, so that any API server can write its answer, and later requests can go on from it."""

from __future__ import annotations

from typing import Any

import msgspec

from api.request.response_items import Item, item_id


class KeptResponse(msgspec.Struct):
    """`shown`: what the answer repeats of the body. `items`: the conversation that the prompt was made of, empty where the response
    is not stored. The conversation is whole, so that it does not end with the responses that it came from."""

    shown: dict[str, Any]
    items: list[Item]

    @classmethod
    def decoded(cls, payload: bytes) -> KeptResponse:
        return _decode(payload)

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)

    def sizes(self) -> dict[str, int]:
        """Bytes of JSON, by field of the body."""
        fields = {"input": self.items, **self.shown}
        return {name: len(msgspec.json.encode(value)) for name, value in fields.items()}

    def input_items(self, request_id: str) -> list[Item]:
        """Each with an id. `request_id`: internal."""
        return [
            item if "id" in item else {"id": item_id(item["type"], request_id, f"in{place}"), **item}
            for place, item in enumerate(self.items)
        ]


_decode = msgspec.json.Decoder(KeptResponse).decode
