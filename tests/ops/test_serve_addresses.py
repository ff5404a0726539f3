"""`headrace serve` on a Unix socket and behind TLS, to clients of others: curl and the `openai` package."""

from __future__ import annotations

import os
import shlex
import signal
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.api.live_server import sse_events
from tests.ops.serving import Serving, left, serving

MESSAGES: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def null_model(smollm2_gguf: Path) -> tuple[str, ...]:
    return (str(smollm2_gguf), "--load-format", "null", "--served-model-name", "null")


def curl(server: Serving, *options: str) -> str:
    """The text of a streamed chat, by the command that `serve` announces."""
    command = shlex.split(server.curl.replace('"max_tokens": 200', '"max_tokens": 8'))
    answer = subprocess.run([*command, *options, "-sS"], capture_output=True, text=True, timeout=30)
    assert answer.returncode == 0, answer.stderr
    *events, done = sse_events(answer.stdout.split("\n"))
    assert done == "[DONE]", answer.stdout
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events)


def openai_chat(base_url: str, http: httpx.Client) -> str:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, http_client=http) as client:
        chunks = client.chat.completions.create(model="null", messages=MESSAGES, max_tokens=8, stream=True)
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


def test_a_unix_socket_is_served_and_a_dead_servers_is_taken_over(null_model: tuple[str, ...], tmp_path: Path) -> None:
    path = str(tmp_path / "api.sock")
    arguments = (*null_model, "--uds", path)
    with serving(*arguments, data_dir=tmp_path / "data") as server:
        assert server.url == path
        assert curl(server) and openai_chat("http://localhost/v1", httpx.Client(transport=httpx.HTTPTransport(uds=path)))
        with serving(*arguments, data_dir=tmp_path / "other", ready=False) as second:
            assert second.wait() == 1
            assert second.lines == [f"headrace: cannot listen on {path}: address already in use; choose another with --uds"]
        assert curl(server), "the first one goes on"
        family = server.family()
        os.kill(server.process.pid, signal.SIGKILL)
        assert left([*family, psutil.Process(server.process.pid)]) == [] and os.path.exists(path)
    with serving(*arguments, data_dir=tmp_path / "data") as server:
        assert curl(server)
        assert server.stop() == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files of a certificate for this machine that no authority has signed, and of its key."""
    folder = tmp_path_factory.mktemp("tls")
    make_certificate(folder / "certificate.pem", folder / "key.pem")
    make_certificate(folder / "other.pem", folder / "other-key.pem")
    return str(folder / "certificate.pem"), str(folder / "key.pem")


def make_certificate(certificate: Path, key: Path) -> None:
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*make.split(), *name, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)


def test_tls_is_served(null_model: tuple[str, ...], certificate: tuple[str, str], tmp_path: Path) -> None:
    chain, key = certificate
    with serving(*null_model, "--ssl-certfile", chain, "--ssl-keyfile", key, data_dir=tmp_path / "data") as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert curl(server, "--cacert", chain)
        assert openai_chat(f"{server.url}/v1", httpx.Client(verify=ssl.create_default_context(cafile=chain)))
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"{server.url}/live")
        with pytest.raises(httpx.TransportError):
            httpx.get(server.url.replace("https", "http") + "/live")
        assert curl(server, "--cacert", chain), "after a client that spoke no TLS"
        assert server.stop() == 0


@pytest.mark.parametrize("key", ["other-key.pem", "nowhere.pem", "certificate.pem"])
def test_a_key_that_is_not_the_certificates_is_one_line(
    null_model: tuple[str, ...], certificate: tuple[str, str], tmp_path: Path, key: str
) -> None:
    chain, right_key = certificate
    files = ("--ssl-certfile", chain, "--ssl-keyfile", str(Path(right_key).with_name(key)))
    with serving(*null_model, *files, data_dir=tmp_path / "data", ready=False) as server:
        assert server.wait() == os.EX_CONFIG
        (line,) = server.lines
        assert line.startswith("headrace: --ssl-certfile and --ssl-keyfile cannot be used: ")
