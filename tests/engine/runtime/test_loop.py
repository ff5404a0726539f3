"""The engine as its clients meet it: outputs, aborts, stops, replays, refusals, death; over a real Redis with the null model."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from engine.bus import keys, leases, records
from engine.bus.call import Fenced
from engine.bus.enqueue import AdmissionLimits, Refused, RequestFacts
from engine.client.client import AsyncClient
from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishedOutput,
    FinishReason,
    OutputPromptLogprobs,
    Replay,
    RequestTimes,
    Utility,
    encode,
    encode_column,
)
from engine.runtime.intake import Arrival
from engine.runtime.loop import IDLE_SECONDS
from engine.scheduling.request import Request
from engine.scheduling.scheduler import LOOKAHEAD
from gpu.null import null_tokens
from gpu.plan import SamplingParams, child_seed
from tests.engine.conftest import MODEL, RunningEngine
from tests.engine.following import Follower
from tests.waiting import wait_for_async

NO_LIMITS = AdmissionLimits()


def make_request(client: AsyncClient, name: str = "r", prompt: int = 20, **sampling: object) -> EngineCoreRequest:
    handle = client.next_handle()
    params = {"max_tokens": 10, "seed": handle, "ignore_eos": True, **sampling}
    return EngineCoreRequest(
        version=PROTOCOL_VERSION,
        request_id=f"{name}-{handle:08x}",
        prompt_token_ids=encode_column(np.arange(300, 300 + prompt)),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
        client=client.incarnation,
        handle=handle,
    )


async def add(
    client: AsyncClient,
    *requests: EngineCoreRequest,
    external_id: str = "mine",
    stop: dict[int, int] | None = None,
    model: str = MODEL,
    limits: AdmissionLimits = NO_LIMITS,
) -> list[Follower]:
    followers = [Follower(stop or {}) for _ in requests]
    streams = await client.add(model, list(requests), followers, RequestFacts(external_id, retention=600), limits)
    for follower, stream in zip(followers, streams, strict=True):
        follower.stream = stream
    return followers


async def add_long(client: AsyncClient, prompt: int = 20) -> Follower:
    """A request for 450 tokens, of which the first has come."""
    (stream,) = await add(client, make_request(client, prompt=prompt, max_tokens=450))
    await stream.has_tokens()
    return stream


@pytest.fixture
def slow_engine(start_engine: Callable[..., RunningEngine], monkeypatch: pytest.MonkeyPatch) -> RunningEngine:
    """A request of `add_long` runs on it for 9 seconds: it is there whatever comes meanwhile."""
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.02")
    return start_engine()


def expected(request: EngineCoreRequest, choice: int = 0, prompt: int = 20) -> list[int]:
    count = request.sampling.max_tokens
    seeds = np.full(count, child_seed(request.sampling.seed, choice), np.uint64)
    return null_tokens(seeds, np.arange(prompt, prompt + count, dtype=np.uint64), 256, 49152).tolist()


async def settled(engine: RunningEngine) -> None:
    """Wait until the engine holds nothing, then prove it."""

    def empty() -> bool:
        return not (len(engine.loop.held) or engine.core.has_work or engine.bus.run(records.live_requests(MODEL)))

    await wait_for_async(empty, "the end of all requests")
    stats = engine.core.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == engine.core.limits.num_blocks - 1


async def test_outputs_come_whole_and_end_once(engine: RunningEngine, client: AsyncClient) -> None:
    requests = [make_request(client) for _ in range(40)]  # more than run at once
    streams = [(await add(client, request))[0] for request in requests]
    for request, (tokens, ends) in zip(requests, await asyncio.gather(*map(Follower.whole, streams)), strict=True):
        assert tokens == [expected(request)]
        assert ends[0].reason == FinishReason.LENGTH
        times = ends[0].times
        assert 0 < times.received <= times.scheduled <= times.first_token <= times.last_token <= times.finished
    await settled(engine)
    record = await client.record(MODEL, requests[0].request_id)
    assert record is not None
    assert (record.state, record.reason, record.output_tokens, record.prompt_tokens) == ("ended", "length", 10, 20)


async def test_choices_differ_and_each_ends(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, n=3)
    (stream,) = await add(client, request)
    tokens, ends = await stream.whole(3)
    assert tokens == [expected(request, choice) for choice in range(3)]
    assert [end.reason for end in ends] == [FinishReason.LENGTH] * 3
    await settled(engine)


async def test_logprobs_and_prompt_logprobs_come_complete(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, prompt=300, logprobs=2, prompt_logprobs=1)  # longer than a step's budget
    (stream,) = await add(client, request)
    await stream.whole()
    assert all(len(entry.token_ids) == 12 for entry in stream.logprobs)
    assert [entry.offset for entry in stream.logprobs] == list(range(10))
    parts = [range(part.position, part.position + len(part.ranks) // 4) for part in stream.prompt_logprobs]
    assert list(itertools.chain(*parts)) == list(range(1, 300))
    await settled(engine)


async def test_abort_of_a_running_request_frees_its_blocks(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    result = await client.abort(MODEL, stream.request_id)
    assert result.found and result.state == "ended" and 0 < result.num_tokens < 450
    assert slow_engine.core.stats().num_free_blocks == slow_engine.core.limits.num_blocks - 1
    _, ends = await stream.whole()
    assert (ends[0].reason, ends[0].num_tokens) == (FinishReason.ABORT, result.num_tokens)
    again = await client.abort(MODEL, stream.request_id)
    assert again.found and again.num_tokens == result.num_tokens
    await settled(slow_engine)


async def test_a_running_record_tells_what_the_prefix_cache_gave(slow_engine: RunningEngine, client: AsyncClient) -> None:
    (first,) = await add(client, make_request(client, prompt=40))
    await first.whole()
    stream = await add_long(client, prompt=40)
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and (record.state, record.cached_tokens) == ("running", 32)  # whole blocks
    stream.abort()
    await settled(slow_engine)


async def test_a_client_that_leaves_frees_the_engine(engine: RunningEngine, client: AsyncClient) -> None:
    streams = [(await add(client, make_request(client, max_tokens=450)))[0] for _ in range(30)]  # running and waiting ones
    await streams[0].has_tokens()
    for stream in streams:
        stream.abort()
    await settled(engine)
    assert client.num_streams == 0


async def test_abort_of_a_queued_request_needs_no_engine(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    request = make_request(client)
    (stream,) = await add(client, request, limits=AdmissionLimits(require_engine=False))
    result = await client.abort(MODEL, request.request_id)
    assert (result.state, result.num_tokens) == ("ended", 0)
    _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ABORT
    await settled(start_engine())


async def test_an_abort_that_overtakes_its_request_wins(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client)
    assert not (await client.abort(MODEL, request.request_id)).found
    with pytest.raises(Refused) as refusal:
        await add(client, request)
    assert refusal.value.reason == "aborted"
    await settled(engine)


async def test_an_abort_read_before_its_request_wins(engine: RunningEngine, client: AsyncClient) -> None:
    """The engine reads commands and requests from different keys: the command may be first."""
    request = make_request(client, max_tokens=450)
    engine.loop.inbox.put(Abort(request.request_id))
    (stream,) = await add(client, request)
    tokens, ends = await stream.whole()
    assert (tokens, ends[0].reason) == ([[]], FinishReason.ABORT)
    await settled(engine)


async def test_a_row_that_fails_ends_alone_though_the_next_step_is_planned(
    start_engine: Callable[..., RunningEngine], client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_NULL_RUNNER", "step_seconds=0.002,fail_seed=77")
    engine = start_engine()
    good = make_request(client, max_tokens=100)
    (stream,) = await add(client, good)
    await stream.has_tokens()
    bad = [(await add(client, make_request(client, seed=77)))[0] for _ in range(3)]
    for tokens, ends in await asyncio.gather(*map(Follower.whole, bad)):
        assert (tokens, ends[0].reason) == ([[]], FinishReason.ERROR)
        assert ends[0].error is not None and "seed 77 fails" in ends[0].error
    tokens, _ = await stream.whole()
    assert tokens[0] == expected(good)[100 - len(tokens[0]) :]
    await settled(engine)
    assert engine.error is None


async def test_live_records_count_the_tokens_of_running_requests(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    seen = await wait_for_async(lambda: slow_engine.bus.run(records.live_requests(MODEL))[0].output_tokens, "progress in the list")
    assert 0 < seen <= 450
    assert slow_engine.bus.run(records.find(MODEL, "mine"))[0].output_tokens >= seen
    stream.abort()
    await settled(slow_engine)


async def test_a_stop_string_cuts_the_output(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, max_tokens=450)
    (stream,) = await add(client, request, stop={0: 5})
    tokens, ends = await stream.whole()
    assert len(tokens[0]) == 5
    assert (ends[0].reason, ends[0].num_tokens, ends[0].stop_reason) == (FinishReason.STOP, 5, "END")
    await settled(engine)
    record = await client.record(MODEL, request.request_id)
    assert record is not None and (record.reason, record.output_tokens) == ("stop", 5)


async def test_lost_messages_are_healed(engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every third message is lost on the way, the last one too."""
    taken = client._take_in
    count = 0

    def lossy(payload: bytes) -> None:
        nonlocal count
        count += 1
        if count % 3:
            taken(payload)

    monkeypatch.setattr(client, "_take_in", lossy)
    requests = [make_request(client, max_tokens=60) for _ in range(5)]
    streams = [(await add(client, request))[0] for request in requests]
    async with asyncio.timeout(30):
        results = await asyncio.gather(*map(Follower.whole, streams))
    for request, (tokens, _) in zip(requests, results, strict=True):
        assert tokens == [expected(request)]
    await settled(engine)


async def test_an_unreadable_message_is_repaired_like_a_lost_one(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = client._take_in
    messages = iter(range(100))
    monkeypatch.setattr(client, "_take_in", lambda payload: taken(payload if next(messages) else payload[:-1]))
    request = make_request(client)
    (stream,) = await add(client, request)
    async with asyncio.timeout(30):
        tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_cut_subscription_is_healed(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    connections = slow_engine.bus._client.execute_command("CLIENT", "KILL", "TYPE", "pubsub")
    assert connections >= 1
    async with asyncio.timeout(30):
        await stream.has_tokens(stream.num_tokens + 1)
        stream.abort()
    await settled(slow_engine)


async def test_a_request_on_its_way_is_not_given_up_after_a_cut(engine: RunningEngine, client: AsyncClient) -> None:
    """Redis holds `enqueue` back; meanwhile the subscription breaks, and its healing finds no record of the request."""
    redis = engine.bus._client.execute_command
    request = make_request(client)
    redis("CLIENT", "PAUSE", 10_000, "WRITE")
    adding = asyncio.create_task(add(client, request))
    async with asyncio.timeout(30):
        await wait_for_async(lambda: client.num_streams, "the stream", pause=0)
        (stream,) = client._streams.values()
        redis("CLIENT", "KILL", "TYPE", "pubsub")
        await client._repair(stream)
        redis("CLIENT", "UNPAUSE")
        (follower,) = await adding
        assert follower.stream is stream
        tokens, _ = await follower.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_prompt_that_does_not_fit_ends_with_an_error(engine: RunningEngine, client: AsyncClient) -> None:
    (stream,) = await add(client, make_request(client, prompt=600))
    _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ERROR and "600 tokens" in (ends[0].error or "")
    await settled(engine)


class Damage:
    """How a faulty API server writes a request, and what the engine says of it."""

    def __init__(self, name: str, said: str, write: Callable[[EngineCoreRequest], bytes]) -> None:
        self.name, self.said, self.write = name, said, write

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
        (*mine, b"command", encode(Replay(request.request_id, 0, -5, client.incarnation, request.handle))),
        (*mine, b"command", encode(Replay(request.request_id, 7, 2**31, client.incarnation, request.handle))),
        (*mine, b"command", encode(Replay(request.request_id, 7, 0, client.incarnation, 2**64 - 1))),
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


async def test_a_request_taken_twice_runs_once(engine: RunningEngine, client: AsyncClient) -> None:
    request = make_request(client, max_tokens=450)
    (stream,) = await add(client, request)
    await stream.has_tokens()
    engine.loop.inbox.put(Arrival(request, engine.core.make_requests(request, 1.0, 1.0)))
    tokens, _ = await stream.whole()
    assert tokens == [expected(request)]
    await settled(engine)


async def test_a_request_on_its_way_to_the_scheduler_keeps_its_place(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The intake looks for room on a thread of its own, also while the loop admits a request."""
    add_request, rooms = engine.core.add_request, []

    def look_and_add(request: Request) -> None:
        rooms.append(engine.loop.intake._room()[0])
        add_request(request)

    monkeypatch.setattr(engine.core, "add_request", look_and_add)
    (stream,) = await add(client, make_request(client))
    await stream.whole()
    assert rooms == [LOOKAHEAD - 1]
    await settled(engine)


async def test_a_gap_in_a_stream_that_the_same_message_ends_is_ignored(engine: RunningEngine, client: AsyncClient) -> None:
    """Prompt logprobs are missing, and before they can be asked for the engine ends the request with an error."""
    request = make_request(client, prompt=40, prompt_logprobs=0)
    (stream,) = await add(client, request, model="nobody", limits=AdmissionLimits(require_engine=False))
    late = OutputPromptLogprobs(request.handle, 20, encode_column([7]), encode_column([0.0], np.float32), encode_column([1]))
    end = FinishedOutput(request.handle, 0, 0, FinishReason.ERROR, None, 0, RequestTimes(), "broken")
    client._take_in(EngineCoreOutputs("nobody:0", 1, 1, prompt_logprobs=[late], finished=[end]))
    _, ends = await stream.whole()
    assert ends == [end] and client.num_streams == 0


async def test_limits_refuse_the_whole_list(engine: RunningEngine, client: AsyncClient) -> None:
    with pytest.raises(Refused) as refusal:
        await add(client, *(make_request(client) for _ in range(3)), limits=AdmissionLimits(max_num_queued_reqs=2))
    assert refusal.value.reason == "max_num_queued_reqs"
    assert client.num_streams == 0
    await settled(engine)


async def test_cancelling_add_at_any_await_leaves_nothing(engine: RunningEngine, client: AsyncClient) -> None:
    for delay in range(12):
        task = asyncio.create_task(add(client, make_request(client, max_tokens=450)))
        for _ in range(delay):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        if isinstance(outcome, list):
            outcome[0].abort()
    await settled(engine)
    assert client.num_streams == 0


async def test_waiting_requests_run_by_priority(start_engine: Callable[..., RunningEngine], client: AsyncClient) -> None:
    waiting = AdmissionLimits(require_engine=False)
    order: list[int] = []

    async def run(priority: int) -> None:
        request = msgspec.structs.replace(make_request(client, max_tokens=40), priority=priority)
        (stream,) = await add(client, request, limits=waiting)
        await stream.whole()
        order.append(priority)

    tasks = [asyncio.create_task(run(priority)) for priority in (5, 1, 3)]

    async def all_wait() -> bool:
        return len(await client._bus.run(records.live_requests(MODEL))) == 3

    await wait_for_async(all_wait, "three requests in the queue")
    engine = start_engine(max_num_seqs=1)
    await asyncio.gather(*tasks)
    assert order == [1, 3, 5]
    await settled(engine)


async def test_a_hung_engine_is_fenced_and_its_requests_end(slow_engine: RunningEngine, client: AsyncClient) -> None:
    """Its slot is taken from it while it runs, as after a stop that outlasted its time to live."""
    stream = await add_long(client)
    slow_engine.bus.run(leases.release_slot(MODEL, slow_engine.info.slot, slow_engine.info.incarnation))
    async with asyncio.timeout(10):
        _, ends = await stream.whole()
    assert ends[0].reason == FinishReason.ERROR
    slow_engine.join()
    assert isinstance(slow_engine.error, Fenced)
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and (record.state, record.reason) == ("ended", "error")


async def test_an_abort_finds_the_end_in_the_record_when_its_engine_died(
    slow_engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slow_engine.loop, "_obey", lambda command, report: None)
    stream = await add_long(client)
    aborting = asyncio.create_task(client.abort(MODEL, stream.request_id, timeout=60))
    slow_engine.bus.run(leases.release_slot(MODEL, slow_engine.info.slot, slow_engine.info.incarnation))
    async with asyncio.timeout(10):
        result = await aborting
    assert (result.found, result.state) == (True, "ended")
    assert result.record is not None and result.record.reason == "error"
    slow_engine.join()


async def test_an_abort_without_confirmation_is_unconfirmed(
    slow_engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as deaf:
        deaf.setattr(slow_engine.loop, "_obey", lambda command, report: None)
        stream = await add_long(client)
        assert (await client.abort(MODEL, stream.request_id, timeout=0.2)).state == "unconfirmed"
    assert (await client.abort(MODEL, stream.request_id)).state == "ended"
    await settled(slow_engine)


async def test_shutdown_ends_running_requests(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop()
    async with asyncio.timeout(5):
        _, ends = await stream.whole()
    assert (ends[0].reason, ends[0].error) == (FinishReason.ERROR, "The engine was shut down.")
    slow_engine.join()
    assert slow_engine.bus.run(leases.engines(MODEL)) == []
    assert slow_engine.error is None


async def test_a_draining_engine_still_obeys_aborts(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=60)
    async with asyncio.timeout(10):
        result = await client.abort(MODEL, stream.request_id)
    assert result.state == "ended" and 0 < result.num_tokens < 450
    slow_engine.join()  # nothing is left to wait for
    assert slow_engine.error is None


async def test_the_second_stop_does_not_wait(slow_engine: RunningEngine, client: AsyncClient) -> None:
    stream = await add_long(client)
    slow_engine.loop.stop(timeout=60)
    slow_engine.loop.stop(timeout=60)
    slow_engine.join()
    _, (end,) = await stream.whole()
    assert end.reason == FinishReason.ERROR


def test_stop_takes_no_lock_of_the_loop(engine: RunningEngine) -> None:
    """A signal handler runs it between any two instructions of the loop, one that rings the intake's bell among them."""
    stopping = threading.Thread(target=engine.loop.stop, daemon=True)
    with engine.loop.intake._bell._cond:
        stopping.start()
        stopping.join(10)
        assert not stopping.is_alive()
    engine.join()


async def test_requests_in_the_inbox_end_with_their_engine(
    engine: RunningEngine, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = threading.Event()
    monkeypatch.setattr(engine.loop, "_take_in", lambda: looks.wait(0.01))  # the inbox is never emptied
    await asyncio.to_thread(looks.wait, 2 * IDLE_SECONDS)  # a look that had begun is over
    (stream,) = await add(client, make_request(client))

    async def running() -> bool:
        record = await client.record(MODEL, stream.request_id)
        return record is not None and record.state == "running"

    async with asyncio.timeout(10):
        await wait_for_async(running, "the engine has taken it")
        engine.loop.stop()
        tokens, (end,) = await stream.whole()
    assert tokens == [[]] and (end.reason, end.error) == (FinishReason.ERROR, "The engine was shut down.")
    await asyncio.to_thread(engine.join)


async def test_utility_calls(engine: RunningEngine, client: AsyncClient) -> None:
    await client.directory.refresh()
    (info,) = client.directory.engines
    assert (await client.utility(info, "reset_prefix_cache")).value is True
    assert (await client.utility(info, "no_such_call")).error == "There is no utility call 'no_such_call'."
    assert (await client.utility(info, "start_profile")).ok
    assert not (await client.utility(info, "start_profile")).ok
    assert str((await client.utility(info, "stop_profile")).value).endswith(".pstats")
    wrong = await client.utility(info, "sleep", "now")
    assert not wrong.ok and "TypeError" in (wrong.error or "")
    assert (await client.utility(info, "sleep")).ok
    (stream,) = await add(client, make_request(client))
    record = await client.record(MODEL, stream.request_id)
    assert record is not None and record.state == "queued"
    assert (await client.utility(info, "wake_up")).ok
    tokens, _ = await stream.whole()
    assert len(tokens[0]) == 10
    await settled(engine)
