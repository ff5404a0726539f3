"""OpenAI's Responses API, through its client and real processes with a scripted model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel

from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LONG = " ".join(f"Line {number} of the poem, naïve as it is." for number in range(12))
EPIC = " ".join(f"Verse {number} of the epic." for number in range(25))
THOUGHT = "<think>\nWhat is it?\n\nTwo.\n</think>\n\nIt is 2."
RULES: list[dict[str, Any]] = [
    {"match": r"weather in (\w+)", "answer": [CALL.replace("Rome", r"\1"), r"It is sunny in \1."]},
    {"match": r"clouds over (\w+)", "answer": [CALL.replace("get", "sky__get").replace("Rome", r"\1"), r"None over \1."]},
    {"match": "thank you", "answer": "Any time."},
    {"match": "object", "answer": '{"a": 1}'},
    {"match": "poem", "answer": LONG},
    {"match": "epic", "answer": EPIC},
    {"match": "think", "answer": THOUGHT},
    {"match": "hello", "answer": "Hello, world."},
]
ALICE = {"Authorization": f"Bearer {KEYS['alice']}"}
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """Steps of 5 ms, so that a response can be met while it runs; keys of two tenants."""
    script = tmp_path_factory.mktemp("script") / "script.json"
    script.write_text(json.dumps(RULES))
    engine = ("--load-format", "scripted", "--script", str(script), "--max-model-len", "4k")
    api = ("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--record-retention", "1000")
    keys = ("--api-key", f"alice={KEYS['alice']}", "--api-key", f"bob={KEYS['bob']}")
    with LiveServer(smollm2_gguf, engine, (*api, *keys), null="step_seconds=0.005") as server:
        yield server


def client_of(url: str, name: str = "alice") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEYS[name], max_retries=0)


@pytest.fixture(scope="module")
def client(server: LiveServer) -> Iterator[openai.OpenAI]:
    with client_of(server.url) as client:
        yield client


def raw(server: LiveServer, method: str, path: str, body: Any = None, name: str = "alice", url: str = "") -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEYS[name]}"}
    return server.http.request(method, f"{url}/v1/responses{path}", json=body, headers=headers)


def check_stream(events: list[Any]) -> Any:
    """The response that a stream ends with. Its numbers have no gap, and each `done` has the sum of its deltas."""
    assert [event.sequence_number for event in events] == list(range(events[0].sequence_number, events[-1].sequence_number + 1))
    assert events[0].type == "response.created" and events[0].sequence_number == 0
    texts: dict[str, str] = {}
    done: list[Any] = []
    for event in events:
        kind = event.type.removeprefix("response.")
        if kind.endswith(".delta"):
            texts[event.item_id] = texts.get(event.item_id, "") + event.delta
        elif kind == "function_call_arguments.done":
            assert event.arguments == texts[event.item_id]
        elif kind in ("output_text.done", "reasoning_text.done"):
            assert event.text == texts[event.item_id]
        elif kind == "content_part.done":
            assert event.part.text == texts[event.item_id]
        elif kind == "output_item.added":
            assert (event.output_index, event.item.status) == (len(done), "in_progress")
        elif kind == "output_item.done":
            done.append(event.item)
    final = events[-1].response
    assert final.output == done
    return final


def without_ids(response: Any) -> dict[str, Any]:
    """What two answers to one body have in common."""
    shown: dict[str, Any] = response.to_dict()
    for item in shown["output"]:
        item["id"] = item.pop("call_id", "")
    times = {
        "id": "",
        "created_at": 0,
        "completed_at": 0,
        "background": False,
        "usage": {**shown["usage"], "input_tokens_details": 0},
    }
    return {**shown, **times, "output": [{**item, "id": ""} for item in shown["output"]]}


BODIES: dict[str, dict[str, Any]] = {
    "text": {"input": "hello", "instructions": "Be kind.", "metadata": {"a": "b"}},
    "reasoning": {"input": [{"role": "user", "content": "think"}], "reasoning": {"effort": "low", "summary": "auto"}},
    "a call": {"input": "weather in Oslo", "tools": [WEATHER], "tool_choice": "auto"},
    "a limit": {"input": "poem", "max_output_tokens": 5, "temperature": 0.5},
    "logprobs": {"input": "hello", "include": ["message.output_text.logprobs"], "top_logprobs": 2},
    "a stop": {"input": "poem", "extra_body": {"stop": "Line 2"}},
}


@pytest.mark.parametrize("name", BODIES)
def test_a_stream_tells_what_the_whole_answer_has_and_so_does_a_look_at_it(client: openai.OpenAI, name: str) -> None:
    body = {"model": "tiny", **BODIES[name]}
    whole = client.responses.create(**body)
    final = check_stream(list(client.responses.create(**body, stream=True)))
    assert without_ids(final) == without_ids(whole)
    assert client.responses.retrieve(whole.id).to_dict() == whole.to_dict()
    assert client.responses.retrieve(final.id).to_dict() == final.to_dict()
    assert whole.status == ("incomplete" if name == "a limit" else "completed")
    assert (whole.incomplete_details is not None) == (name == "a limit")


def test_a_response_says_all_that_openais_does(client: openai.OpenAI) -> None:
    body = {**BODIES["text"], "user": "u", "safety_identifier": "s", "prompt_cache_key": "k", "top_p": 0.5, "max_tool_calls": 2}
    shown = client.responses.create(model="tiny", **body).to_dict()
    given = {"instructions": "Be kind.", "metadata": {"a": "b"}, **{name: body[name] for name in list(body)[-5:]}}
    fixed: dict[str, Any] = {
        **{"object": "response", "status": "completed", "background": False, "error": None, "incomplete_details": None},
        **{"max_output_tokens": None, "model": "tiny", "parallel_tool_calls": True, "previous_response_id": None, "prompt": None},
        **{"prompt_cache_retention": None, "reasoning": {"effort": None, "summary": None}, "service_tier": "default"},
        **{"store": True, "temperature": 1.0, "text": {"format": {"type": "text"}, "verbosity": "medium"}, "conversation": None},
        **{"tool_choice": "auto", "tools": [], "top_logprobs": 0, "truncation": "disabled"},
    }
    assert {name: shown[name] for name in (given | fixed)} == given | fixed
    assert shown.keys() - given.keys() - fixed.keys() == {"id", "created_at", "completed_at", "output", "usage"}
    (message,) = shown["output"]
    part = {"type": "output_text", "text": "Hello, world.", "annotations": [], "logprobs": []}
    assert message == {"id": message["id"], "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    usage = shown["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"] and usage["output_tokens"] > 3
    assert usage["output_tokens_details"] == {"reasoning_tokens": 0}
    assert usage["input_tokens_details"].keys() == {"cached_tokens", "cache_write_tokens"}


def test_a_response_that_takes_too_long_has_failed(client: openai.OpenAI) -> None:
    created = client.responses.create(model="tiny", input="epic", background=True, extra_body={"timeout": 0.3})
    events = list(client.responses.retrieve(created.id, stream=True))
    failed = check_stream(events)
    assert (events[-1].type, failed.status, failed.error.code) == ("response.failed", "failed", "server_error")
    assert "deadline passed" in failed.error.message and EPIC.startswith(failed.output_text)
    assert client.responses.retrieve(created.id).to_dict() == failed.to_dict()
    with pytest.raises(openai.BadRequestError, match="has failed"):
        client.responses.create(model="tiny", input="hello", previous_response_id=created.id)


def test_an_answer_has_its_reasoning_calls_and_logprobs(client: openai.OpenAI) -> None:
    reasoned = client.responses.create(model="tiny", **BODIES["reasoning"])
    thought, message = reasoned.output
    assert reasoned.usage is not None and 8 < reasoned.usage.output_tokens_details.reasoning_tokens < reasoned.usage.output_tokens
    assert thought.type == "reasoning" and thought.content and thought.content[0].text == "What is it?\n\nTwo."
    assert message.type == "message" and message.content[0].to_dict()["text"] == "It is 2."
    (call,) = client.responses.create(model="tiny", **BODIES["a call"]).output
    assert call.type == "function_call" and (call.name, json.loads(call.arguments)) == ("get_weather", {"city": "Oslo"})
    answer = client.responses.create(model="tiny", **BODIES["logprobs"])
    logprobs = answer.output[0].to_dict()["content"][0]["logprobs"]
    assert "".join(entry["token"] for entry in logprobs).startswith("Hello, world.")
    assert {len(entry["top_logprobs"]) for entry in logprobs} == {2}
    assert client.responses.create(model="tiny", **BODIES["a stop"]).output_text == LONG[: LONG.index("Line 2")]


class Object(BaseModel):
    a: int


def test_the_clients_helpers_read_streams_and_parse(client: openai.OpenAI) -> None:
    parsed = client.responses.parse(model="tiny", input="an object", text_format=Object)
    assert parsed.output_parsed == Object(a=1)
    with client.responses.stream(model="tiny", input="an object", text_format=Object) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_parsed == Object(a=1)


def test_a_loop_of_tools_goes_on_from_the_previous_response(client: openai.OpenAI) -> None:
    first = client.responses.create(model="tiny", input="weather in Rome", tools=[WEATHER], instructions="Be short.")
    (call,) = first.output
    assert call.type == "function_call"
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees, no clouds"}
    second = client.responses.create(model="tiny", input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert (second.output_text, second.previous_response_id, second.instructions) == ("It is sunny in Rome.", first.id, None)
    third = client.responses.create(model="tiny", input="thank you", previous_response_id=second.id)
    assert third.output_text == "Any time."
    items = client.responses.input_items.list(third.id, order="asc").data
    assert [item.type for item in items] == ["message", "function_call", "function_call_output", "message", "message"]
    assert items[1].to_dict() == call.to_dict() and items[3].to_dict() == second.output[0].to_dict()
    whole: Any = [{"role": "user", "content": "weather in Rome"}, call.to_dict(), result]
    assert client.responses.create(model="tiny", input=whole, tools=[WEATHER], store=False).output_text == "It is sunny in Rome."
    references: Any = [{"type": "item_reference", "id": items[0].id}, {"id": call.id}, result]
    assert client.responses.create(model="tiny", input=references, tools=[WEATHER]).output_text == "It is sunny in Rome."


def test_a_function_in_a_namespace_is_called_by_both_names(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "namespace", "name": "sky", "description": "Weather", "tools": [WEATHER]}]
    body: dict[str, Any] = {"model": "tiny", "tools": tools, "input": "clouds over Rome"}
    final = check_stream(list(client.responses.create(**body, stream=True)))
    (call,) = final.output
    assert (call.namespace, call.name, json.loads(call.arguments)) == ("sky", "get_weather", {"city": "Rome"})
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "none"}
    assert client.responses.create(**{**body, "input": [result]}, previous_response_id=final.id).output_text == "None over Rome."


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    given: Any = [{"role": "user", "content": f"number {number}"} for number in range(5)]
    given.append({"role": "assistant", "content": [{"type": "output_text", "text": "yes"}]})
    given.append({"role": "user", "content": [{"type": "input_text", "text": "hello"}], "id": "msg_mine"})
    made = client.responses.create(model="tiny", input=given)
    newest = client.responses.input_items.list(made.id, limit=3)
    assert len(newest.data) == 3 and newest.has_more and newest.data[0].id == "msg_mine"
    everything = list(newest)
    assert len(everything) == 7 and len({item.id for item in everything}) == 7
    oldest = client.responses.input_items.list(made.id, order="asc", after=everything[-1].id or "").data
    assert [item.id for item in oldest] == [item.id for item in everything[-2::-1]]


def test_a_response_in_the_background_is_followed_from_any_event(client: openai.OpenAI, server: LiveServer) -> None:
    created = client.responses.create(model="tiny", input="poem", background=True)
    assert (created.status, created.output, created.background) == ("queued", [], True)
    events = list(client.responses.retrieve(created.id, stream=True))
    final = check_stream(events)
    assert [event.type for event in events[:3]] == ["response.created", "response.queued", "response.in_progress"]
    assert (final.output_text, final.status) == (LONG, "completed")
    assert client.responses.retrieve(created.id).to_dict() == final.to_dict()
    for number in (0, 3, 50, len(events) - 2, len(events) - 1):
        rest = list(client.responses.retrieve(created.id, stream=True, starting_after=number))
        assert [event.to_dict() for event in rest] == [event.to_dict() for event in events[number + 1 :]]
    streamed = client.responses.create(model="tiny", input="epic", background=True, stream=True)
    seen: list[Any] = []
    for event in streamed:
        seen.append(event)
        if len(seen) == 20:
            break
    streamed.close()
    rest = list(client.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number))
    assert check_stream([*seen, *rest]).output_text == EPIC


def test_a_response_is_cancelled_where_it_is_in_the_background(client: openai.OpenAI, server: LiveServer) -> None:
    created = client.responses.create(model="tiny", input="epic", background=True, stream=True)
    events = [next(created) for _ in range(10)]
    first: Any = events[0]
    cancelled = client.responses.cancel(first.response.id)
    assert cancelled.status == "cancelled" and cancelled.output_text and EPIC.startswith(cancelled.output_text)
    assert cancelled.output[0].to_dict()["status"] == "incomplete"
    assert check_stream([*events, *created]).status == "cancelled"
    assert client.responses.cancel(first.response.id).to_dict() == cancelled.to_dict()
    synchronous = client.responses.create(model="tiny", input="hello")
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(synchronous.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.cancel("resp_gone")
    running = client.responses.create(model="tiny", input="epic", background=True)
    path = f"/v1/requests/{running.id}/cancel"
    assert server.http.post(path, headers=ALICE).json()["state"] == "ended"
    assert client.responses.retrieve(running.id).status == "cancelled"


def test_a_response_is_found_by_its_tenant_alone_where_it_is_stored_and_until_it_is_deleted(
    client: openai.OpenAI, server: LiveServer
) -> None:
    made = client.responses.create(model="tiny", input="hello")
    running = client.responses.create(model="tiny", input="epic", background=True)
    unstored = client.responses.create(model="tiny", input="hello", store=False)
    for id, name in ((made.id, "bob"), (unstored.id, "alice"), ("resp_gone", "alice"), ("resp_~", "alice")):
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items"), ("GET", "?stream=true")):
            answer = raw(server, method, f"/{id}{path}", name=name)
            error = answer.json()["error"]
            expected = (404, f"Response with id '{id}' not found.", "NotFoundError", "response_id")
            assert (answer.status_code, error["message"], error["type"], error["param"]) == expected
    for each in (made, unstored):
        shown = server.http.get(f"/v1/requests/{each.id}", headers=ALICE).json()["answer"]
        assert shown == (None if each is unstored else each.to_dict())
    assert server.http.get(f"/v1/requests/{unstored.id}/stream", headers=ALICE).status_code == 404
    with pytest.raises(openai.BadRequestError, match="has not ended yet"):
        client.responses.create(model="tiny", input="hello", previous_response_id=running.id)
    for each in (made, running):
        assert raw(server, "DELETE", f"/{each.id}").json() == {"id": each.id, "object": "response", "deleted": True}
        assert raw(server, "GET", f"/{each.id}").status_code == 404
        with pytest.raises(openai.NotFoundError, match=f"Previous response with id '{each.id}' not found"):
            client.responses.create(model="tiny", input="hello", previous_response_id=each.id)
    record = server.http.get(f"/v1/requests/{running.id}", headers=ALICE).json()
    assert (record["state"], record["finish_reason"], record["answer"]) == ("ended", "abort", None)


def test_retries_with_an_idempotency_key_make_one_response(client: openai.OpenAI) -> None:
    body: dict[str, Any] = {"model": "tiny", "input": "poem", "extra_headers": {"Idempotency-Key": "poem"}}
    created = client.responses.create(**body, background=True)
    assert client.responses.create(**body, background=True).id == created.id
    with pytest.raises(openai.UnprocessableEntityError):
        client.responses.create(**body)
    assert check_stream(list(client.responses.retrieve(created.id, stream=True))).output_text == LONG
    assert client.responses.create(**body, background=True).output_text == LONG


def test_a_large_body_goes_on_from_stored_items(client: openai.OpenAI) -> None:
    """It is read in another process."""
    first = client.responses.create(model="tiny", input="weather in Rome", tools=[WEATHER])
    (call,) = first.output
    assert call.type == "function_call"
    given: Any = [{"id": call.id}, {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}]
    question: Any = {"role": "user", "content": "weather in Rome"}
    more = {"padding": "x" * 70_000}
    made = client.responses.create(model="tiny", input=[question, *given], tools=[WEATHER], extra_body=more)
    assert made.output_text == "It is sunny in Rome."
    later = client.responses.create(model="tiny", input="thank you", previous_response_id=made.id, extra_body=more)
    assert later.output_text == "Any time."


def test_the_oldest_turns_go_where_the_conversation_is_too_long(client: openai.OpenAI) -> None:
    turns: Any = [{"role": "user", "content": f"turn {number} " + "word " * 900} for number in range(8)]
    given: Any = [{"role": "system", "content": "Be kind."}, *turns, {"role": "user", "content": "hello"}]
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.responses.create(model="tiny", input=given)
    made = client.responses.create(model="tiny", input=given, truncation="auto")
    assert made.output_text == "Hello, world." and made.truncation == "auto"
    kept = [str(item.to_dict()["content"]) for item in client.responses.input_items.list(made.id, order="asc")]
    assert "Be kind." in kept[0] and "turn 7" in kept[-2] and 3 <= len(kept) < 7
    assert made.usage is not None and made.usage.input_tokens > 4096 - 1000


def test_a_response_in_the_background_outlives_its_api_server_and_its_engine(client: openai.OpenAI, server: LiveServer) -> None:
    calm = client.responses.create(model="tiny", input="epic")
    process, url = server.start_api()
    server.wait_until_healthy(url)
    with client_of(url) as doomed:
        running = doomed.responses.create(model="tiny", input="epic", background=True)
        seen: list[Any] = []
        with doomed.responses.retrieve(running.id, stream=True) as stream:
            for event in stream:
                seen.append(event)
                if len(seen) == 15:
                    break
        process.kill()
        server.ended(process)
        server.restart_engine()
    assert client.responses.retrieve(running.id).status in ("queued", "in_progress")
    rest = list(client.responses.retrieve(running.id, stream=True, starting_after=seen[-1].sequence_number))
    final = check_stream([*seen, *rest])
    assert (final.output_text, final.status) == (EPIC, "completed") and calm.output_text == EPIC
    assert final.usage.output_tokens == calm.usage.output_tokens if calm.usage else False
    assert client.responses.retrieve(running.id).to_dict() == final.to_dict()
