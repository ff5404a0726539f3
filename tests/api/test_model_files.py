"""Models whose files are broken: what depends on the broken file is refused, and nothing else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import httpx
import pytest
from msgspec import structs
from starlette.types import Receive, Scope, Send

from api.app import create_app
from api.errors import UnusableModel
from api.http.response_writer import EXTENSION
from api.model_files import make_model_files
from engine.bus.connection import Bus
from engine.bus.tokenizers import put_tokenizer
from engine.config import ApiConfig, RedisConfig
from engine.protocol import TokenizerBundle
from tests.engine.conftest import RunningEngine, null_config
from tests.waiting import wait_for_async

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
BROKEN_TEMPLATES = {
    "endfo": "{% for m in messages %}{{ m.content }}{% endfo %}",
    "go": "{{ if .System }}<|im_start|>system {{ .System }}{{ end }}",
    "tag": "{% think %}{{ messages }}{% endthink %}",
    "filter": "{{ messages | shout }}",
    "nested": "{% for a in b %}" * 30 + "{% endfor %}" * 30,
}


def bundles(sound: TokenizerBundle) -> dict[str, TokenizerBundle]:
    broken = {name: structs.replace(sound, chat_template=template) for name, template in BROKEN_TEMPLATES.items()}
    return {"sound": sound, **broken, "tokenizer": structs.replace(sound, tokenizer_json='{"model": 1}')}


@pytest.fixture
def engines(redis_url: str, smollm2_bundle: TokenizerBundle) -> Iterator[None]:
    """An engine for a sound model, and one for a model of each broken kind."""
    with ExitStack() as stack, Bus(redis_url) as bus:
        for name, bundle in bundles(smollm2_bundle).items():
            bus.run(put_tokenizer(name, name, bundle))
            config = null_config()
            config.scheduler.scheduling_policy = "priority" if name == "go" else "fcfs"
            engine = RunningEngine(redis_url, config, model=name, tokenizer=name)
            stack.callback(engine.stop)
        yield


@pytest.fixture
async def http(engines: None, redis_url: str) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(ApiConfig(), RedisConfig(redis_url=redis_url))
    service = app.state.service
    failures: list[BaseException] = []
    service.on_failure = failures.append
    await service.start()

    async def connected(scope: Scope, receive: Receive, send: Send) -> None:
        writer = SimpleNamespace(gone=False, num_bytes=0, when_gone=lambda told: None)  # as of a client that stays
        await app({**scope, "extensions": {EXTENSION: writer}}, receive, send)

    async with httpx.AsyncClient(transport=httpx.ASGITransport(connected), base_url="http://test") as client:
        await wait_for_async(lambda: len(service.client.directory.models) == len(BROKEN_TEMPLATES) + 2, "the sight of all engines")
        await service.models.prepare(service.client)
        yield client
    await service.close()
    assert not failures


async def test_a_broken_file_refuses_only_the_requests_that_need_it(http: httpx.AsyncClient) -> None:
    for name in ("sound", *BROKEN_TEMPLATES):
        answer = await http.post(TEXT, json={"model": name, "prompt": [5, 6], "max_tokens": 2})
        assert answer.status_code == 200, answer.text
    for name in BROKEN_TEMPLATES:
        answer = await http.post(CHAT, json={"model": name, "messages": MESSAGES})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"].startswith(f"The model `{name}` cannot chat: its chat template is not valid (")
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "Hi"}), ("/tokenize", {"prompt": "Hi"})):
        answer = await http.post(path, json={"model": "tokenizer", **body})
        assert answer.status_code == 500
        assert answer.json()["error"]["message"].startswith("The tokenizer of `tokenizer` cannot be read: ")
    answer = await http.post(CHAT, json={"model": "sound", "messages": MESSAGES, "max_tokens": 2})
    assert answer.status_code == 200, answer.text
    assert (await http.get("/health")).status_code == 200


async def test_a_priority_counts_where_the_policy_is_priority(http: httpx.AsyncClient) -> None:
    for model, expected in (("sound", 0), ("go", -5)):
        body = {"model": model, "prompt": [5, 6], "max_tokens": 2, "priority": -5}
        answer = await http.post(TEXT, json=body)
        record = (await http.get(f"/v1/requests/{answer.json()['id']}")).json()
        assert (answer.status_code, record["priority"]) == (200, expected)


def test_a_model_with_a_broken_tokenizer_is_unusable(smollm2_bundle: TokenizerBundle) -> None:
    for text in ("", "{", '{"model": 1}', smollm2_bundle.tokenizer_json.replace('"BPE"', '"RNN"')):
        with pytest.raises(UnusableModel, match="The tokenizer of `m` cannot be read"):
            make_model_files("m", "hash", structs.replace(smollm2_bundle, tokenizer_json=text))


def test_defaults_that_no_request_could_ask_for_are_ignored(
    smollm2_bundle: TokenizerBundle, caplog: pytest.LogCaptureFixture
) -> None:
    given = {"temperature": 5.0, "top_p": "0.9", "top_k": 50.0, "min_p": True, "repetition_penalty": 1.1, "max_new_tokens": 7}
    files = make_model_files("m", "hash", structs.replace(smollm2_bundle, generation_config=given))
    assert files.generation_config == {"top_k": 50, "repetition_penalty": 1.1, "max_new_tokens": 7}
    told = [record.getMessage() for record in caplog.records]
    assert [any(f"the default for {field} of model m is ignored" in line for line in told) for field in given] == [
        *(True, True, False, True, False, False)
    ]
