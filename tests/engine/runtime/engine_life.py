"""An engine without Redis: its loop and core, stepped by the test, which may let it die after any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import msgspec
import numpy as np

from engine.protocol import (
    Abort,
    EngineCoreOutputs,
    EngineCoreRequest,
    RequestTimes,
    SamplingParams,
    StoredOutput,
    decode_client_message,
    decode_column,
    encode,
    encode_column,
)
from engine.runtime.core import EngineCore
from engine.runtime.folding import FoldedOutput, fold
from engine.runtime.intake import Arrival
from engine.runtime.loop import EngineLoop
from engine.runtime.publisher import StepEvents
from engine.runtime.reconciliation import Forget
from engine.scheduling.step_outputs import StepOutputs

CLIENT = "api:1"


def make_source(name: str, prompt: Sequence[int], handle: int = 1, **sampling: object) -> EngineCoreRequest:
    params = SamplingParams(**{"seed": 5, **sampling})  # type: ignore[arg-type]
    return EngineCoreRequest(1, name, encode_column(prompt), params, CLIENT, handle)


@dataclass
class Life:
    """What one engine did: its messages as they crossed the bus, what it would store of requests that ended, which it started."""

    core: EngineCore
    incarnation: int = 1
    messages: list[EngineCoreOutputs] = field(default_factory=list)
    stored: dict[str, StoredOutput] = field(default_factory=dict)
    times: dict[str, RequestTimes] = field(default_factory=dict)  # of each request that got its first token here
    num_sampled: int = 0

    def __post_init__(self) -> None:
        self.loop = EngineLoop(self.core, "model", [])
        intake = SimpleNamespace(num_admitted=0, tokens_admitted=0, ring=lambda: None)
        publisher = SimpleNamespace(put=self._put)
        self.loop.attach(SimpleNamespace(), intake, publisher, SimpleNamespace(), SimpleNamespace())  # type: ignore[arg-type]

    def run(self, *items: Arrival | Abort | Forget) -> Life:
        """To the end of all requests; then the engine holds nothing."""
        while self.turn(*items):
            items = ()
        assert not len(self.loop.held)
        stats = self.core.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_free_blocks) == (0, 0, self.core.limits.num_blocks - 1)
        self.core.scheduler.check_integrity()
        return self

    def turn(self, *items: Arrival | Abort | Forget) -> bool:
        """One turn of the engine's loop; False: there was nothing to do."""
        for item in (*items, None):
            self.loop.inbox.put(item)
        self.loop._take_in()
        outputs = self.core.step()
        if outputs is not None:
            self.num_sampled += len(outputs.token_ids)
            self.loop._give_out(outputs)
        return outputs is not None

    def _put(self, events: StepEvents) -> None:
        outputs = events.outputs or StepOutputs()
        message = EngineCoreOutputs(
            "model:0",
            self.incarnation,
            len(self.messages) + 1,
            encode_column(outputs.handles, np.int64),
            encode_column(outputs.choices),
            encode_column(outputs.offsets),
            encode_column(outputs.token_ids),
            [told for _, told in events.logprobs],
            [told for _, told in events.prompt_logprobs],
            [held.finished_output(request) for held, request in events.ended_choices],
        )
        decoded = decode_client_message(encode(message))
        assert isinstance(decoded, EngineCoreOutputs)
        self.messages.append(decoded)
        for held in events.started:
            self.times[held.source.request_id] = msgspec.structs.replace(held.choices[0].times)
        for held in events.ended:
            self.stored[held.source.request_id] = held.stored_output()


def arrive(core: EngineCore, source: EngineCoreRequest, folded: FoldedOutput | None = None, *orders: Abort) -> Arrival:
    now = core.clock()
    return Arrival(source, core.make_requests(source, now, now, folded), folded, orders)


def fold_life(life: Life, source: EngineCoreRequest, num_messages: int, keep_ends: bool = True) -> FoldedOutput:
    """What the engine had told of a request when it died after so many messages; perhaps before it told that choices had ended."""
    messages = life.messages[:num_messages]
    if not keep_ends:
        messages = [msgspec.structs.replace(message, finished=[]) for message in messages]
    return fold(source, [(CLIENT, message) for message in messages], [(CLIENT, source.handle)])


def tokens_of(stored: StoredOutput) -> list[list[int]]:
    return [decode_column(choice.token_ids).tolist() for choice in stored.choices]


def assert_same_output(stored: StoredOutput, calm: StoredOutput) -> None:
    """Token for token and logprob for logprob."""
    assert tokens_of(stored) == tokens_of(calm)
    for got, want in zip(stored.choices, calm.choices, strict=True):
        assert (got.reason, got.stop_reason, got.error) == (want.reason, want.stop_reason, want.error)
        assert [entry.offset for entry in got.logprobs] == [entry.offset for entry in want.logprobs]
        for entry, expected in zip(got.logprobs, want.logprobs, strict=True):
            assert (entry.token_ids[:4], entry.rank) == (expected.token_ids[:4], expected.rank)
            assert_close(entry.logprobs, expected.logprobs)
    got_prompt, want_prompt = (
        [b"".join(getattr(part, name) for part in output.prompt_logprobs) for name in ("logprobs", "ranks", "token_ids")]
        for output in (stored, calm)
    )
    assert got_prompt[1:] == want_prompt[1:]
    assert_close(got_prompt[0], want_prompt[0])


def assert_close(logprobs: bytes, expected: bytes) -> None:
    """What a step computes of many tokens at once may add up in another order."""
    np.testing.assert_allclose(decode_column(logprobs, np.float32), decode_column(expected, np.float32), atol=1e-4, rtol=0)
