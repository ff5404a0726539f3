"""What only a real model shows: words that stop it, characters across tokens, biases, its own end."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.text.tokenizer import TextTokenizer
from tests.api.live_server import LiveServer, sse_events
from tests.api.request_states import until_state
from tests.api.resuming import broken_streams, continued, merged, streamed

GREEDY = {"temperature": 0, "max_tokens": 10}
PROMPTS = [
    "The capital of France is",
    "1, 2, 3, 4,",
    "Translate to Japanese: good morning ->",
    "Emoji: 🚀 naïve café —",
]


@pytest.fixture(scope="module")
def server(smollm2_gguf: Path) -> Iterator[LiveServer]:
    engine = ("--max-model-len", "512", "--num-gpu-blocks-override", "200", "--max-num-seqs", "24")
    with LiveServer(smollm2_gguf, engine, ("--enable-prompt-tokens-details",), name="smollm2") as server:
        yield server


def ask(server: LiveServer, prompt: Any, **fields: Any) -> dict[str, Any]:
    answer = server.http.post("/v1/completions", json={"prompt": prompt, **GREEDY, **fields}, timeout=120)
    assert answer.status_code == 200, answer.text
    choice: dict[str, Any] = answer.json()["choices"][0]
    return choice


def stream(server: LiveServer, prompt: Any, **fields: Any) -> tuple[str, str]:
    """The text that a stream's chunks add up to, and how it ended."""
    body = {"prompt": prompt, **GREEDY, "stream": True, **fields}
    with server.http.stream("POST", "/v1/completions", json=body, timeout=120) as answer:
        parts = [event["choices"][0] for event in sse_events(list(answer.iter_lines()))[:-1]]
    return "".join(part["text"] for part in parts), parts[-1]["finish_reason"]


def test_the_model_names_the_capital_of_france(server: LiveServer) -> None:
    assert ask(server, PROMPTS[0])["text"].startswith(" Paris")


@pytest.mark.parametrize("prompt", PROMPTS)
def test_streamed_and_whole_agree(server: LiveServer, prompt: str) -> None:
    whole = ask(server, prompt)
    assert stream(server, prompt) == (whole["text"], whole["finish_reason"])
    sampled = {"temperature": 1.0, "seed": 17}
    assert stream(server, prompt, **sampled)[0] == ask(server, prompt, **sampled)["text"]


@pytest.mark.parametrize("span", [2, 3])
def test_a_stop_string_across_tokens_ends_the_text_before_it(server: LiveServer, tokenizer: TextTokenizer, span: int) -> None:
    free = ask(server, PROMPTS[1], return_token_ids=True)
    pieces = [tokenizer.decode([token_id]) for token_id in free["token_ids"]]
    first = pieces[4 : 4 + span]
    stop = first[0][-1:] + "".join(first[1:-1]) + first[-1][:1]
    cut = free["text"].index(stop)
    choice = ask(server, PROMPTS[1], stop=stop)
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == (free["text"][:cut], "stop", stop)
    assert ask(server, PROMPTS[1], stop=stop, include_stop_str_in_output=True)["text"] == free["text"][: cut + len(stop)]
    assert stream(server, PROMPTS[1], stop=stop) == (free["text"][:cut], "stop")


def test_tokens_and_logprobs_end_with_the_text_at_a_stop_string(server: LiveServer) -> None:
    fields = {"max_tokens": 60, "stop": ["12"], "logprobs": 0, "return_token_ids": True}
    whole = ask(server, "1, 2, 3, 4, 5,", **fields)
    assert (whole["finish_reason"], whole["text"][-4:]) == ("stop", "11, ")
    assert "".join(whole["logprobs"]["tokens"]) == whole["text"]
    assert len(whole["token_ids"]) == len(whole["logprobs"]["token_logprobs"]) == len(whole["logprobs"]["text_offset"])
    body = {"prompt": "1, 2, 3, 4, 5,", **GREEDY, "stream": True, **fields}
    events = sse_events(server.http.post("/v1/completions", json=body).text.split("\n"))[:-1]
    parts = [event["choices"][0] for event in events]
    assert [token_id for part in parts for token_id in part.get("token_ids", ())] == whole["token_ids"]
    assert [token for part in parts for token in (part["logprobs"] or {"tokens": []})["tokens"]] == whole["logprobs"]["tokens"]


def test_a_tokens_alternatives_begin_with_the_token_itself(server: LiveServer) -> None:
    logprobs = ask(server, "One two three", max_tokens=1, echo=True, logprobs=1)["logprobs"]
    first, *tops = logprobs["top_logprobs"]
    assert first is None and [next(iter(top)) for top in tops] == logprobs["tokens"][1:]
    assert any(len(top) == 2 for top in tops), "the model would have said something else"


def test_characters_across_tokens_come_whole(server: LiveServer, tokenizer: TextTokenizer) -> None:
    """The model is led along an emoji's bytes: no delta ever shows half of it."""
    emoji = tokenizer.encode("🚀")
    assert len(emoji) > 1
    fields = {"allowed_token_ids": emoji, "max_tokens": 12, "temperature": 1.0, "seed": 4, "return_token_ids": True}
    whole = ask(server, "Launch:", **fields)
    assert whole["text"] == tokenizer.decode(whole["token_ids"])
    assert stream(server, "Launch:", **fields)[0] == whole["text"]


def test_the_output_completes_a_character_that_the_prompt_cut(server: LiveServer, tokenizer: TextTokenizer) -> None:
    token_ids = tokenizer.encode("Launch 🚀")
    cut = token_ids[:-1]
    assert tokenizer.decode(cut).endswith("\ufffd")
    fields = {"allowed_token_ids": [token_ids[-1]], "max_tokens": 1}
    assert ask(server, cut, **fields)["text"] == "🚀"
    assert stream(server, cut, **fields)[0] == "🚀"
    assert ask(server, cut, **fields, echo=True)["text"] == "Launch 🚀"
    assert stream(server, cut, **fields, echo=True)[0] == "Launch 🚀"


def test_a_stop_token_of_the_request_ends_the_output(server: LiveServer, tokenizer: TextTokenizer) -> None:
    free = ask(server, PROMPTS[1], return_token_ids=True)
    stop = free["token_ids"][5]
    length = free["token_ids"].index(stop)
    choice = ask(server, PROMPTS[1], stop_token_ids=[stop], return_token_ids=True)
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert choice["token_ids"] == free["token_ids"][: length + 1]
    assert choice["text"] == tokenizer.decode(free["token_ids"][:length])
    shown = ask(server, PROMPTS[1], stop_token_ids=[stop], include_stop_str_in_output=True)
    assert shown["text"] == tokenizer.decode(free["token_ids"][: length + 1])


def test_an_answer_ends_with_the_models_end_token_unshown(server: LiveServer) -> None:
    """A short chat answer ends with the end-of-turn token, which is not shown."""
    body = {"messages": [{"role": "user", "content": "Say only: yes"}], "temperature": 0, "max_tokens": 60}
    answer = server.http.post("/v1/chat/completions", json=body, timeout=120).json()
    (choice,) = answer["choices"]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", None)
    assert "<|im_end|>" not in choice["message"]["content"]
    length = answer["usage"]["completion_tokens"] + 3
    more = {**body, "max_tokens": length, "ignore_eos": True}
    longer = server.http.post("/v1/chat/completions", json=more, timeout=120).json()
    assert longer["usage"]["completion_tokens"] == length


def test_min_tokens_delay_the_end_token(server: LiveServer) -> None:
    body = {"messages": [{"role": "user", "content": "Say only: yes"}], "temperature": 0, "max_tokens": 200}
    first = server.http.post("/v1/chat/completions", json=body, timeout=120).json()["usage"]["completion_tokens"]
    least = first + 2
    answer = server.http.post("/v1/chat/completions", json={**body, "min_tokens": least}, timeout=120).json()
    assert answer["usage"]["completion_tokens"] > least


def test_biases_allowed_tokens_and_bad_words_steer_the_model(server: LiveServer, tokenizer: TextTokenizer) -> None:
    (paris,) = tokenizer.encode(" Paris")
    (london,) = tokenizer.encode(" London")
    assert ask(server, PROMPTS[0], max_tokens=1, logit_bias={str(london): 100})["text"] == " London"
    assert ask(server, PROMPTS[0], max_tokens=1, allowed_token_ids=[london])["text"] == " London"
    assert ask(server, PROMPTS[0], max_tokens=1, bad_words=["Paris"])["text"] != tokenizer.decode([paris])


def test_bad_words_that_leave_no_second_token_are_a_400(server: LiveServer, tokenizer: TextTokenizer) -> None:
    """The first token has a choice, the second has none."""
    assert tokenizer.encode("12") == [tokenizer.encode("1")[0], tokenizer.encode("2")[0]]
    digits = {"allowed_token_ids": tokenizer.encode("12"), "bad_words": ["11", "12", "21", "22"], "max_tokens": 8}
    answer = server.http.post("/v1/completions", json={"prompt": "1", **digits})
    message = "Invalid request: its sampling parameters leave no token to choose"
    assert (answer.status_code, answer.json()["error"]["message"]) == (400, message)
    with server.http.stream("POST", "/v1/completions", json={"prompt": "1", "stream": True, **digits}) as stream:
        *_, last, done = sse_events(list(stream.iter_lines()))
    assert (last["error"]["code"], last["error"]["type"], done) == (400, "BadRequestError", "[DONE]")


def test_logprobs_are_a_distribution(server: LiveServer) -> None:
    choice = ask(server, PROMPTS[0], max_tokens=4, logprobs=20)
    for own, top in zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"], strict=True):
        assert own == max(top.values()) <= 0
        assert len(top) == 20


def test_a_prompt_token_scores_as_it_did_when_it_was_sampled(server: LiveServer) -> None:
    """The logprob of a token is the same whether it was sampled or stood in the prompt."""
    made = ask(server, PROMPTS[0], max_tokens=8, logprobs=0)
    scored = ask(server, PROMPTS[0] + made["text"], echo=True, max_tokens=0, logprobs=0)
    assert scored["logprobs"]["tokens"][-8:] == made["logprobs"]["tokens"]
    assert scored["logprobs"]["token_logprobs"][-8:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)


def test_cached_prompt_tokens_are_told(server: LiveServer) -> None:
    prompt = list(range(1000, 1100))
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": "once"}
    first, second = (server.http.post("/v1/completions", json=body, timeout=120).json()["usage"] for _ in range(2))
    assert first["prompt_tokens_details"] == {"cached_tokens": 0}
    assert second["prompt_tokens_details"] == {"cached_tokens": 96}
    other = server.http.post("/v1/completions", json={**body, "cache_salt": "other"}, timeout=120).json()
    assert other["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


async def test_streams_continue_at_another_server_within_characters_and_stop_strings(
    server: LiveServer, tokenizer: TextTokenizer
) -> None:
    """At each event, whole and once."""
    _, other = server.start_api()
    server.wait_until_healthy(other)
    emoji = {"allowed_token_ids": tokenizer.encode("🚀"), "max_tokens": 12, "temperature": 1.0, "seed": 4}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as here, httpx.AsyncClient(base_url=other, timeout=120) as there:
        for body in (
            {"prompt": "Launch:", **emoji},
            {"prompt": tokenizer.encode("Launch 🚀")[:-1], **emoji, "n": 2, "echo": True},
            {"prompt": "1, 2, 3, 4, 5,", "temperature": 0, "max_tokens": 60, "stop": ["12", ", 11, 13"], "logprobs": 1},
        ):
            request_id, whole = await streamed(here, "/v1/completions", body)
            want = merged(whole)
            answer = (await there.get(f"/v1/requests/{request_id}")).json()["answer"]
            assert [want[choice["index"]]["text"] for choice in answer["choices"]] == [each["text"] for each in answer["choices"]]
            for count in range(1, len(whole)):
                assert merged(whole[:count] + await continued(there, request_id, whole[count - 1][0])) == want


async def test_sixteen_streams_of_a_killed_server_go_on_at_another(server: LiveServer) -> None:
    """The text that each client has in the end is that of the stored answer, whole and once."""
    process, url = server.start_api()
    server.wait_until_healthy(url)
    chats = [
        {
            "messages": [{"role": "user", "content": f"Tell me about the number {number}."}],
            "max_tokens": 48,
            "n": 1 + number % 2,
            "temperature": 0.8,
            "stop": [["never said"], ["the", "."]][number % 4 == 0],
            "min_tokens": 24,
        }
        for number in range(16)
    ]
    async with httpx.AsyncClient(base_url=url, timeout=120) as doomed, httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        pieces = await broken_streams(doomed, "/v1/chat/completions", chats, 6, lambda: process.send_signal(signal.SIGKILL))
        server.ended(process)
        rest = await asyncio.gather(*[continued(http, request_id, before[-1][0]) for request_id, before in pieces])
        for (request_id, before), after in zip(pieces, rest, strict=True):
            told = merged(before + after)
            for choice in (await until_state(http, request_id, "ended"))["answer"]["choices"]:
                mine, end = told[choice["index"]], (choice["finish_reason"], choice["stop_reason"])
                assert (mine["text"], mine["ends"]) == (choice["message"]["content"], [end])


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0, "maximum": 120}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
COMPACT = {"json": PERSON, "disable_any_whitespace": True}


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 11}, {"temperature": 1, "seed": 5, "n": 3}])
def test_an_answer_is_of_its_schema(server: LiveServer, sampling: dict[str, Any]) -> None:
    body = {"max_tokens": 100, **sampling, "structured_outputs": COMPACT, "prompt": "Ann is a person:"}
    answer = server.http.post("/v1/completions", json=body, timeout=120).json()
    for choice in answer["choices"]:
        person = json.loads(choice["text"])
        assert choice["finish_reason"] == "stop"
        assert person.keys() == {"name", "age"} and isinstance(person["name"], str) and 0 <= person["age"] <= 120
    fields = {"max_tokens": 100, **sampling, "structured_outputs": COMPACT}
    if "n" not in sampling:
        assert stream(server, "Ann is a person:", **fields) == (answer["choices"][0]["text"], "stop")


def test_a_schema_holds_beside_other_wishes(server: LiveServer) -> None:
    """Penalties, words that must not come, logprobs, a stop string in the middle."""
    wishes = {
        "structured_outputs": COMPACT,
        "max_tokens": 100,
        "presence_penalty": 1.0,
        "bad_words": ["Ann"],
        "logprobs": 2,
    }
    whole = ask(server, "Ann is a person:", **wishes)
    assert "Ann" not in json.loads(whole["text"])["name"]
    assert "".join(whole["logprobs"]["tokens"]).startswith(whole["text"])
    cut = ask(server, "Ann is a person:", **wishes, stop='"age"')
    assert (cut["text"], cut["stop_reason"]) == (whole["text"][: whole["text"].index('"age"')], '"age"')


def test_a_choice_is_one_of_those_given(server: LiveServer) -> None:
    for seed in range(5):
        fields = {"structured_outputs": {"choice": ["oui", "non"]}, "temperature": 1, "seed": seed}
        assert ask(server, "Is the sky green?", **fields)["text"] in ("oui", "non")


def test_a_token_that_the_model_does_not_have_is_a_bad_request(server: LiveServer) -> None:
    body = {"prompt": "x", "structured_outputs": {"grammar": "%llguidance {}\nstart: <|no_such|>"}}
    answer = server.http.post("/v1/completions", json=body, timeout=120)
    assert answer.status_code == 400 and "unknown special token" in answer.json()["error"]["message"]
