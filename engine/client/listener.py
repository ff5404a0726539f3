"""The client's subscription: what engines and scripts publish for one API server reaches the streams that it is for."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

import msgspec
import numpy as np

from engine.bus import keys
from engine.bus.call import BusUnavailable, UnfitRedis
from engine.bus.connection import AsyncBus
from engine.client.abort import Replies
from engine.client.repairs import Repairs
from engine.client.request_stream import FIRST_PAUSE, RequestStream
from engine.protocol import (
    ClientMessage,
    Detached,
    EngineCoreOutputs,
    OutputLogprobs,
    RequestEnded,
    decode_client_message,
    decode_column,
)

logger = logging.getLogger(__name__)

RECONNECT_SECONDS = 0.1  # between attempts to reach Redis again


class Listener:
    """Listens on the channel of API server `client`. `streams` are those that listen, by handle. `detached` is called with a stream
    of which another one has taken the place."""

    def __init__(
        self,
        bus: AsyncBus,
        client: str,
        streams: Mapping[int, RequestStream],
        repairs: Repairs,
        replies: Replies,
        detached: Callable[[RequestStream], None],
        clock: Callable[[], float],
    ) -> None:
        self._bus = bus
        self._client = client
        self._streams = streams
        self._repairs = repairs
        self._replies = replies
        self._detached = detached
        self._clock = clock
        self._incarnations: dict[str, int] = {}  # engine -> the newest incarnation heard of

    async def run(self, subscribed: asyncio.Future[None]) -> None:
        """For ever. `subscribed` gets its result, or its error, at the first attempt."""
        while True:
            try:
                async with self._bus.subscribe(keys.client_channel(self._client)) as subscription:
                    if subscribed.done():
                        self._repairs.note_cut()
                    else:
                        subscribed.set_result(None)
                    while True:
                        message = await subscription.get()
                        if message is not None:
                            self._take_payload(message[1])
            except (BusUnavailable, UnfitRedis) as error:
                if not subscribed.done():
                    subscribed.set_exception(error)
                    return
                await asyncio.sleep(RECONNECT_SECONDS)

    def _take_payload(self, payload: bytes) -> None:
        """A message that cannot be read counts as lost: the probes of its streams ask for its contents."""
        try:
            self.take(decode_client_message(payload))
        except msgspec.DecodeError as error:
            logger.error("a message cannot be read: %s", error)
        except Exception:
            logger.exception("a message cannot be taken in")

    def take(self, message: ClientMessage) -> None:
        if isinstance(message, EngineCoreOutputs):
            if message.incarnation >= self._incarnations.get(message.engine, 0):
                self._incarnations[message.engine] = message.incarnation
                self._take_outputs(message)
        elif isinstance(message, RequestEnded):
            if (stream := self._stream_of(message)) is not None:
                stream.take_end(message.reason, message.error)
        elif isinstance(message, Detached):
            if (stream := self._stream_of(message)) is not None:
                self._detached(stream)
        else:
            self._replies.take(message)

    def _stream_of(self, message: RequestEnded | Detached) -> RequestStream | None:
        stream = self._streams.get(message.handle)
        return stream if stream is not None and stream.request_id == message.request_id else None

    def _take_outputs(self, message: EngineCoreOutputs) -> None:
        gaps = self._take_tokens(message)
        for entry in message.prompt_logprobs:
            stream = self._streams.get(entry.handle)
            if stream is not None and not stream.take_prompt_logprobs(entry):
                gaps.add(entry.handle)
        for terminal in message.finished:
            stream = self._streams.get(terminal.handle)
            if stream is not None and not stream.take_terminal(terminal):
                gaps.add(terminal.handle)
        if message.replayed or message.cut_short or message.not_held:
            self._repairs.note_answer(message)
        gaps.difference_update(message.replayed)  # the engine has no more
        if gaps:
            self._repairs.note_gaps(gaps)

    def _take_tokens(self, message: EngineCoreOutputs) -> set[int]:
        """Returns the handles of streams that lack tokens."""
        next_look = self._clock() + FIRST_PAUSE
        gaps: set[int] = set()
        logprobs = _index_logprobs(message.logprobs)
        columns = (
            decode_column(message.handles, np.int64).tolist(),
            decode_column(message.choices).tolist(),
            decode_column(message.offsets).tolist(),
            decode_column(message.token_ids).tolist(),
        )
        for handle, choice, offset, token_id in zip(*columns, strict=True):
            stream = self._streams.get(handle)
            if stream is not None:
                stream.next_look = next_look  # as `heard` does, which is called for everything but tokens
                stream.pause = FIRST_PAUSE
                told = logprobs.get((handle, choice, offset)) if logprobs else None
                if not stream.take_token(choice, offset, token_id, told):
                    gaps.add(handle)
        return gaps


def _index_logprobs(entries: list[OutputLogprobs]) -> dict[tuple[int, int, int], OutputLogprobs]:
    return {(entry.handle, entry.choice, entry.offset): entry for entry in entries}
