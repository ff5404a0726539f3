"""Looking at requests and ending them, over a real Redis, as an engine and an API server would have left them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.bus import control, journals, keys, leases, transitions
from engine.bus.connection import Bus
from engine.bus.enqueue import enqueue as enqueue_call
from engine.bus.journals import EndedRequest
from engine.bus.leases import ClaimedSlot
from engine.bus.records import RecordView
from engine.protocol import (
    PROTOCOL_VERSION,
    Abort,
    ControlReply,
    EngineCoreRequest,
    EngineInfo,
    FinishReason,
    RequestFacts,
    RequestTimes,
    StoredOutput,
    encode,
    encode_column,
)
from gpu.plan import SamplingParams
from ops import requests
from ops.cli import cli
from ops.requests import timeline

MODEL = "null-model"


@pytest.fixture
def bus(redis_url: str) -> Iterator[Bus]:
    with Bus(redis_url) as bus:
        yield bus


@pytest.fixture
def slot(bus: Bus) -> ClaimedSlot:
    """An engine that is alive for the length of a test."""
    info = EngineInfo(
        slot="", incarnation=0, model=MODEL, served_names=[MODEL, "alias"], fingerprint="f", protocol_versions=[PROTOCOL_VERSION],
        tokenizer="t", max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=64, block_size=16, num_blocks=65, vocab_size=100,
        max_logprobs=20, dtype="float32", device="cpu", tensor_parallel_size=1, pid=1, host="here", started=time.time(),
    )  # fmt: skip
    return bus.run(leases.claim_slot(MODEL, info, ttl=60.0))


def enqueue(bus: Bus, external_id: str, number: int) -> str:
    request_id = f"{external_id}-{number:08x}"
    sampling, facts = SamplingParams(max_tokens=16), RequestFacts(external_id, 3600, "/v1/completions", stream=True, model="alias")
    prompt = encode_column([1, 2, 3])
    request = EngineCoreRequest(PROTOCOL_VERSION, request_id, prompt, sampling, "api", number, tenant="alice", facts=facts)
    bus.run(enqueue_call(MODEL, [request]))
    return request_id


def take(bus: Bus, slot: ClaimedSlot, request_id: str, step: int) -> None:
    bus.run(transitions.take(MODEL, slot.slot, slot.incarnation, "f", step, 1, 16))
    now = time.time()
    started = [(request_id, {"received": str(now), "scheduled": str(now + 0.25)})]
    bus.run(journals.flush(MODEL, slot.slot, slot.incarnation, step - 1, step, started=started))


def headrace(redis_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments], env={"HEADRACE_REDIS_URL": redis_url}, standalone_mode=False)


def as_json(result: Result) -> Any:
    assert result.exception is None, result.exception
    return json.loads(result.stdout)


class Obedient(threading.Thread):
    """Stands for the engine: ends what it is told to, with 5 tokens made, and confirms. `silent`: it ends it without a word."""

    def __init__(self, url: str, slot: ClaimedSlot, silent: bool = False) -> None:
        super().__init__()
        self._url, self._slot, self._silent = url, slot, silent

    def run(self) -> None:
        with Bus(self._url) as bus:
            batch = bus.run(control.read_control(MODEL, self._slot.slot, self._slot.incarnation, block=5.0))
            for command in batch.commands:
                assert isinstance(command, Abort)
                ended = EndedRequest(command.request_id, FinishReason.ABORT, encode(StoredOutput([], 0, RequestTimes())), 5)
                reply = (keys.client_channel(command.reply_to), encode(ControlReply(command.token, num_tokens=5)))
                notices = [] if self._silent else [reply]
                place = (MODEL, self._slot.slot, self._slot.incarnation)
                bus.run(journals.flush(*place, 1, 2, ended=[ended], notices=notices))


def test_ages_are_told_by_redis_clock(bus: Bus, redis_url: str, slot: ClaimedSlot, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine that asks is an hour ahead."""
    enqueue(bus, "cmpl-a", 1)
    monkeypatch.setattr(time, "time", lambda right=time.time: right() + 3600)
    assert " h " not in headrace(redis_url, "ps").stdout and " m " not in headrace(redis_url, "engines").stdout


def test_ps_lists_the_newest_first_and_the_ended_when_asked(bus: Bus, redis_url: str, slot: ClaimedSlot) -> None:
    first = enqueue(bus, "cmpl-a", 1)
    take(bus, slot, first, 1)
    second = enqueue(bus, "cmpl-b", 2)
    third = enqueue(bus, "cmpl-c", 3)
    bus.run(transitions.finish(MODEL, third, Abort(third)))
    listed = as_json(headrace(redis_url, "ps", "--json"))
    assert [(one["id"], one["state"], one["model"], one["tenant"]) for one in listed] == [
        (second, "queued", MODEL, "alice"),
        (first, "running", MODEL, "alice"),
    ]
    everything = as_json(headrace(redis_url, "ps", "-a", "--json", "--model", "alias"))
    assert [(one["id"], one["reason"]) for one in everything] == [(second, ""), (first, ""), (third, "abort")]
    table = headrace(redis_url, "ps", "-a").stdout.splitlines()
    assert table[0].split()[:3] == ["ID", "STATE", "MODEL"]
    assert [line.split()[0] for line in table[1:]] == [second, first, third]


def test_inspect_finds_by_either_id_and_shows_the_way(bus: Bus, redis_url: str, slot: ClaimedSlot) -> None:
    older, newer = enqueue(bus, "mine", 1), enqueue(bus, "mine", 2)
    take(bus, slot, older, 1)
    by_client = as_json(headrace(redis_url, "inspect", "mine", "--json"))
    assert (by_client["id"], by_client["others"]) == (newer, [older])
    by_internal = as_json(headrace(redis_url, "inspect", older, "--json"))
    assert [row["mark"] for row in by_internal["timeline"]] == ["enqueued", "received", "scheduled"]
    assert by_internal["timeline"][1]["seconds"] == pytest.approx(0.25, abs=1e-4)
    text = headrace(redis_url, "inspect", older).stdout
    assert "waits in the engine" in text and "250 ms" in text and "3 tokens" in text


def test_a_request_that_waits_is_moved_and_shows_its_place(bus: Bus, redis_url: str, slot: ClaimedSlot) -> None:
    first, second = enqueue(bus, "one", 1), enqueue(bus, "two", 2)
    assert as_json(headrace(redis_url, "inspect", "two", "--json"))["queue_position"] == 1
    assert headrace(redis_url, "priority", "two", "-7").stdout == f"{second}: priority -7\n"
    assert as_json(headrace(redis_url, "inspect", "two", "--json"))["queue_position"] == 0
    assert "before it" in headrace(redis_url, "inspect", "one").stdout
    take(bus, slot, second, 1)
    assert headrace(redis_url, "priority", "two", "3").stdout == f"{second}: an engine has taken it, it was not moved\n"
    assert as_json(headrace(redis_url, "priority", "one", "3", "--json")) == [{"id": first, "moved": True}]


def test_an_unknown_id_is_one_line(redis_url: str, slot: ClaimedSlot) -> None:
    for command in (("inspect", "nobody"), ("abort", "nobody")):
        assert "there is no request `nobody`" in str(headrace(redis_url, *command).exception)
    assert "there is no model `other`; Redis knows null-model" in str(headrace(redis_url, "ps", "--model", "other").exception)


@pytest.mark.parametrize("silent", [False, True], ids=["confirmed", "seen in the record"])
def test_abort_waits_for_the_engine_and_tells_the_tokens(bus: Bus, redis_url: str, slot: ClaimedSlot, silent: bool) -> None:
    running = enqueue(bus, "a", 1)
    take(bus, slot, running, 1)
    queued = enqueue(bus, "b", 2)
    engine = Obedient(redis_url, slot, silent)
    engine.start()
    result = headrace(redis_url, "abort", "a", "b", "--json")
    engine.join()
    assert as_json(result) == [
        {"id": running, "state": "ended", "output_tokens": 5},
        {"id": queued, "state": "ended", "output_tokens": 0},
    ]
    assert result.return_value == 0
    again = headrace(redis_url, "abort", "a")
    assert again.stdout == f"{running}: already ended, 5 tokens made\n"


def test_abort_of_a_clients_id_ends_all_that_bear_it(bus: Bus, redis_url: str, slot: ClaimedSlot) -> None:
    both = {enqueue(bus, "same", 1), enqueue(bus, "same", 2)}
    other = enqueue(bus, "other", 3)
    assert {one["id"] for one in as_json(headrace(redis_url, "abort", "same", "--json"))} == both
    assert [request.record.id for request in requests.live(bus, None)] == [other]
    assert [one["id"] for one in as_json(headrace(redis_url, "abort", "--all", "--json"))] == [other]
    assert requests.live(bus, None) == []


def test_an_abort_that_the_engine_does_not_answer_is_unconfirmed(bus: Bus, redis_url: str, slot: ClaimedSlot) -> None:
    running = enqueue(bus, "a", 1)
    take(bus, slot, running, 1)
    result = headrace(redis_url, "abort", "a", "--timeout", "0.2", "--json")
    assert as_json(result) == [{"id": running, "state": "unconfirmed", "output_tokens": 0}]
    assert result.return_value == 1


@pytest.mark.parametrize("arguments", [["abort"], ["abort", "--all", "x"]])
def test_abort_needs_ids_or_all(redis_url: str, arguments: list[str]) -> None:
    assert "give the IDs of requests, or --all" in str(headrace(redis_url, *arguments).exception)


def test_engines_lists_the_living(redis_url: str, slot: ClaimedSlot) -> None:
    (engine,) = as_json(headrace(redis_url, "engines", "--json"))
    assert (engine["model"], engine["slot"], engine["max_model_len"]) == (MODEL, slot.slot, 1024)
    table = headrace(redis_url, "engines").stdout
    assert "0/8" in table and "0% of 1040" in table


def test_redis_away_is_one_line() -> None:
    complaint = str(headrace("redis://:secret@127.0.0.1:1/0", "ps").exception)
    assert complaint.startswith("cannot use Redis at redis://:***@127.0.0.1:1/0: ")


def test_a_timeline_counts_only_marks_that_were_passed() -> None:
    view: Callable[..., RecordView] = RecordView
    whole = view("x", enqueued=10.0, received=10.5, scheduled=11.0, first_token=13.0, last_token=14.0, finished=14.25)
    assert [row["seconds"] for row in timeline(whole)] == [0.5, 0.5, 2.0, 1.0, 0.25, None]
    aborted_early = view("x", enqueued=10.0, finished=12.0)
    assert [(row["mark"], row["seconds"]) for row in timeline(aborted_early)] == [("enqueued", 2.0), ("finished", None)]
