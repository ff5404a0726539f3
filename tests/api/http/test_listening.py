"""Where an API server listens: behind TLS, on a Unix socket, under a proxy's path."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from api.app import create_app
from engine.config import ApiConfig, RedisConfig
from ops import listen
from ops.errors import CommandError, SettingError
from tests.api.live_server import LiveServer
from tests.waiting import wait_for

PEM = str(Path(__file__).with_name("localhost.pem"))  # a certificate of its own for localhost, and its key
ASK = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "stream": True}


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/live").status_code == 200
    except httpx.TransportError:
        return False


def test_a_server_with_a_certificate_answers_https(null_server: LiveServer) -> None:
    _, url = null_server.start_api("--ssl-certfile", PEM, "--ssl-keyfile", PEM)
    with httpx.Client(base_url=url.replace("http:", "https:"), verify=False, timeout=10) as client:
        wait_for(lambda: answers(client), "the server")
        assert client.post("/v1/completions", json=ASK).text.endswith("data: [DONE]\n\n")


def test_a_server_answers_on_a_unix_socket(null_server: LiveServer, tmp_path: Path) -> None:
    config = ApiConfig(uds=str(tmp_path / "api.sock"))
    with listen.bind(config) as listener:
        assert listen.url_of(listener, config) == "http://localhost"
        listener.set_inheritable(True)
        null_server.start_api_on(listener)
    with httpx.Client(base_url="http://localhost", transport=httpx.HTTPTransport(uds=config.uds), timeout=10) as client:
        wait_for(lambda: answers(client), "the server")
        assert client.post("/v1/completions", json=ASK).text.endswith("data: [DONE]\n\n")
        with pytest.raises(CommandError, match="address already in use"):
            listen.bind(config)


def test_a_socket_file_of_an_earlier_server_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)
    listen.bind(ApiConfig(uds=path)).close()
    (tmp_path / "file").write_text("precious")
    with pytest.raises(CommandError, match="address already in use"):
        listen.bind(ApiConfig(uds=str(tmp_path / "file")))
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"ssl_keyfile": PEM}, "needs --ssl-certfile"),
        ({"ssl_certfile": "/nowhere.pem"}, "cannot be used: .*No such file"),
        ({"ssl_certfile": __file__}, "cannot be used"),
    ],
)
def test_unusable_certificates_are_refused(settings: dict[str, str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        listen.bind(ApiConfig(port=0, **settings))


@pytest.mark.parametrize("prefix", ["", "/llm"])
async def test_a_server_under_a_path_answers_with_and_without_that_path(prefix: str) -> None:
    app = create_app(ApiConfig(root_path="/llm/", api_key=["alice=key-a"]), RedisConfig())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.get(f"{prefix}/live")).status_code == 200, "a probe needs no key"
        assert (await client.get(f"{prefix}/v1/models")).status_code == 401
        assert (await client.get("/llmx/live")).status_code == 401
        assert (await client.options(f"{prefix}/ping")).headers["allow"] == "GET, POST, HEAD, OPTIONS"
