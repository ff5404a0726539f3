"""Requests and commands that a faulty program wrote harm no other request; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec
import pytest

from engine.bus import keys
from engine.client.client import AsyncClient
from engine.protocol import (
    Abort,
    EngineCoreRequest,
    FinishReason,
    Lack,
    Replay,
    Utility,
    encode,
    encode_column,
)
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.engine.runtime.null_requests import add, make_request, settled


class Damage:
    """How a faulty API server writes a request, and what the engine says of it."""

    def __init__(self, name: str, said: str, write: Callable[[EngineCoreRequest], bytes]) -> None:
        self.name, self.said, self._write = name, said, write

    def write(self, value: object) -> bytes:
        return self._write(value) if isinstance(value, EngineCoreRequest) else encode(value)

    def __repr__(self) -> str:
        return self.name


def with_field(index: int, value: object) -> Callable[[EngineCoreRequest], bytes]:
    def write(request: EngineCoreRequest) -> bytes:
        fields = list(msgspec.structs.astuple(request))
        fields[index] = value
        return msgspec.msgpack.encode(fields)

    return write


def with_sampling(**values: object) -> Callable[[EngineCoreRequest], bytes]:
    return with_field(3, values)


DAMAGES = [
    Damage("no prompt", "not a column of token ids", with_field(2, b"")),
    Damage("half a token", "not a column of token ids", with_field(2, b"abc")),
    Damage("token beyond the vocabulary", "token ids outside 0 to 49151", with_field(2, encode_column([1, 49152]))),
    Damage("negative token", "token ids outside 0 to 49151", with_field(2, encode_column([-1]))),
    Damage("no MessagePack", "Invalid request: ", lambda request: b"no MessagePack"),
    Damage("cut short", "Input data was truncated", lambda request: encode(request)[:20]),
    Damage("nested", "nested too deeply", lambda request: b"\x9c" + encode(request)[1:] + b"\x91" * 100_000),
    Damage("text that is not UTF-8", "Invalid UTF-8", lambda request: encode(request).replace(b"\xa0", b"\xa2\xff\xfe", 1)),
    Damage("a handle of 64 bits without sign", "$[5]", with_field(5, 2**64 - 1)),
    Damage("a priority of 64 bits without sign", "$[6]", with_field(6, 2**63)),
    Damage("not a time", "$[7]", with_field(7, float("nan"))),
    Damage("no choice", "Expected `int` >= 1", with_sampling(n=0)),
    Damage("endless choices", "Expected `int` <= 16384", with_sampling(n=2**40)),
    Damage("not a temperature", "$[3].temperature", with_sampling(temperature=float("nan"))),
    Damage("endless temperature", "$[3].temperature", with_sampling(temperature=float("inf"))),
    Damage("top_k of 32 bits", "$[3].top_k", with_sampling(top_k=2**31)),
    Damage("min_tokens of 64 bits", "$[3].min_tokens", with_sampling(min_tokens=2**63)),
    Damage("endless bias", "$[3].logit_bias", with_sampling(logit_bias={5: float("-inf")})),
    Damage("a biased token of 64 bits", "$[3].logit_bias", with_sampling(logit_bias={2**63: 1.0})),
    Damage("a stop token of 40 bits", "$[3].stop_token_ids", with_sampling(stop_token_ids=[2**40])),
]


async def test_an_unreadable_request_ends_alone(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a faulty API server writes: its request ends with an error that says why, the engine goes on."""
    streams = []
    for damage in DAMAGES:
        with monkeypatch.context() as patch:
            patch.setattr("engine.bus.enqueue.encode", damage.write)
            streams += await add(client, make_request(client))
    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(Follower.whole, streams))
    for damage, (_, ends) in zip(DAMAGES, results, strict=True):
        assert (ends[0].reason, damage) == (FinishReason.ERROR, damage)
        assert damage.said in (ends[0].error or ""), damage
    (stream,) = await add(client, make_request(client))
    tokens, _ = await stream.whole()
    assert len(tokens[0]) == 10
    await settled(engine)


async def test_an_unreadable_command_is_ignored(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, max_tokens=450)
    (stream,) = await add(client, request)
    await stream.has_tokens()
    mine, ours = (b"incarnation", str(engine.info.incarnation)), encode(Utility("drain"))
    control = keys.control(MODEL, engine.info.slot)
    for fields in (
        (b"x", b"y"),
        (b"incarnation", b"many", b"command", ours),
        (b"incarnation", b"\xff", b"command", ours),
        mine,
        (*mine, b"command", b""),
        (*mine, b"command", b"\x98" + b"\x91" * 100_000),
        (*mine, b"command", encode(Replay(client.incarnation, [Lack(request.request_id, request.handle, [(0, -5)])]))),
        (*mine, b"command", encode(Replay(client.incarnation, [Lack(request.request_id, request.handle, [(7, 2**31)])]))),
        (*mine, b"command", encode(Replay(client.incarnation, [Lack(request.request_id, 2**64 - 1, [(7, 0)])]))),
        (*mine, b"command", encode(Replay(client.incarnation, [Lack(request.request_id, 0, [(7, 0), (0, 500)], 99)]))),
        (*mine, b"command", encode(Abort(request.request_id, choice=2**62))),
        (*mine, b"command", encode(Abort(request.request_id, choice=9, keep=-9))),
        (*mine, b"command", encode(Utility("drain", [1, 2, 3]))),
        (*mine, b"command", encode(Utility("no such call"))),
    ):
        engine.bus._client.execute_command("XADD", control, "*", *fields)
    reply = await client.utility(engine.info, "wake_up", "too", "many")
    assert not reply.ok and "TypeError" in (reply.error or "")
    _, ends = await stream.whole()
    assert (ends[0].reason, ends[0].num_tokens) == (FinishReason.LENGTH, 450)
    await settled(engine)
