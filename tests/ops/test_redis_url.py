"""One --redis-url means one server, one database and one check of certificates to both of its readers, or it is refused."""

from __future__ import annotations

import asyncio
import socketserver
import ssl
import subprocess
import threading
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import kombu
import pytest
import redis
from click.testing import CliRunner

from engine.bus.call import BusUnavailable, Trouble
from engine.bus.connection import AsyncBus, Bus
from engine.bus.enqueue import accepts
from engine.bus.servers import Servers
from ops import broker as broker_module
from ops.cli import cli
from ops.errors import CommandError, SettingError
from ops.redis_url import RedisUrl, parse_redis_url
from ops.settings import shown
from tests.redis_server import RedisServer

URLS = [
    "redis://h",
    "redis://h:6380/3",
    "redis://h:6379?db=3",
    "redis://h:6379/3?db=3",
    "REDIS://h/3/",
    " redis://h:6379/3\n",
    "redis:///3",
    "redis://user:p%2Fw%40%3A%25@[::1]:6379/0",
    "redis://:p@w@h/1",
    "redis://user@h/1",
    "unix:///run/redis.sock",
    "unix:///a%20b/s?db=3",
    "unix://user:p%2Fw@/s?db=3",
    "rediss://h/3",
    "rediss://h?db=3&ssl_cert_reqs=none",
    "rediss://h/3?ssl_cert_reqs=optional&ssl_check_hostname=False",
    f"rediss://h/3?ssl_ca_certs={__file__}&ssl_certfile={__file__}&ssl_keyfile={__file__}",
]


def by_redis_py(url: str) -> dict[str, Any]:
    pool: Any = redis.ConnectionPool.from_url(url)
    return facts(pool.make_connection())


@contextmanager
def broker(url: str) -> Iterator[Any]:
    """A client of redis-py as kombu makes it."""
    with kombu.Connection(url, transport_options={"socket_connect_timeout": 5}) as connection:
        channel = connection.transport.Channel.__new__(connection.transport.Channel)  # one that has not connected yet
        channel.connection = connection.transport
        pool = redis.ConnectionPool(**channel._connparams())
        yield redis.Redis(connection_pool=pool)
        pool.disconnect()


def by_kombu(url: str) -> dict[str, Any]:
    with broker(url) as client:
        return facts(client.connection_pool.make_connection())


def facts(connection: Any) -> dict[str, Any]:
    names = ("host", "port", "path", "db", "username", "password", "check_hostname", "ca_certs", "certfile", "keyfile", "cert_reqs")
    kinds = (redis.UnixDomainSocketConnection, redis.SSLConnection, redis.sentinel.SentinelManagedConnection)
    return {
        "kind": [isinstance(connection, kind) for kind in kinds],
        **{name: getattr(connection, name, None) or None for name in names},
    }


SENTINELS = [
    "redis+sentinel://h/m",
    "redis+sentinel://h1:1,h2,[::1]:3/my.master-1/3",
    "redis+sentinel://user:p%2Fw%40@h1,h2/m/3?sentinel_username=s&sentinel_password=a%26b%40",
    "redis+sentinel://:p@h1/m?db=2",
    "REDISS+sentinel://h1,h2/m/3?ssl_cert_reqs=none",
    f"rediss+sentinel://h/m/3?ssl_ca_certs={__file__}",
]


def by_bus_behind_sentinels(url: str) -> list[dict[str, Any]]:
    """Facts of connections to the master and to each Sentinel."""
    servers = Servers(url)
    clients = [client.connection_pool for client in servers._master._sentinel.sentinels]  # type: ignore[union-attr]
    return [facts(pool.make_connection()) for pool in (servers.pool(1.0), *clients)]


def by_kombu_behind_sentinels(parsed: RedisUrl) -> list[dict[str, Any]]:
    broker_module.install()
    with kombu.Connection(parsed.broker, transport_options=parsed.broker_options) as connection:
        channel = connection.transport.Channel.__new__(connection.transport.Channel)
        channel.connection = connection.transport
        for name, value in parsed.broker_options.items():
            setattr(channel, name, value)
        pool = channel._sentinel_managed_pool()
        clients = [client.connection_pool for client in pool.sentinel_manager.sentinels]
        return [facts(each.make_connection()) for each in (pool, *clients)]


@pytest.mark.parametrize("url", SENTINELS)
def test_the_bus_and_celery_ask_the_same_sentinels(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kombu.transport.TRANSPORT_ALIASES", dict(kombu.transport.TRANSPORT_ALIASES))
    parsed = parse_redis_url(url)
    assert by_bus_behind_sentinels(str(parsed)) == by_kombu_behind_sentinels(parsed)
    assert parse_redis_url(str(parsed)) == parsed, "what one process hands to another means the same there"


def test_sentinels_have_a_port_of_their_own() -> None:
    parsed = parse_redis_url("redis+sentinel://h1,[::1]/m")
    assert str(parsed) == "redis+sentinel://h1:26379,[::1]:26379/m/0"


@pytest.mark.parametrize("url", URLS)
def test_redis_py_and_celery_connect_to_the_same_place(url: str) -> None:
    parsed = parse_redis_url(url)
    assert by_redis_py(str(parsed)) == by_kombu(parsed.broker)
    assert parse_redis_url(str(parsed)) == parsed, "what one process hands to another means the same there"


@pytest.mark.parametrize("url", ["redis://h:6379?db=3", "redis://h/3", "unix:///s?db=3", "rediss://h?db=3"])
def test_the_database_is_the_one_that_was_named(url: str) -> None:
    assert by_kombu(parse_redis_url(url).broker)["db"] == 3


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("redis://:p/w@h", "write `/` as %2F"),
        ("redis://:123/w@h/0", "write `/` as %2F"),
        ("redis://:secret?w@h/0", "write `/` as %2F"),
        ("redis://:secret#w@h/0", "`#` as %23"),
        ("redis://:secret[w@h/0", "`[` as %5B"),
        ("h:6379", "must begin with redis://"),
        ("h", "must begin with redis://"),
        ("redis:h:6379", "must begin with redis://"),
        ("http://h:6379", "must begin with redis://"),
        ("redis://h:http", "the port is not a number"),
        ("redis://h:0", "the port is not a number"),
        ("redis://h:99999", "the port is not a number"),
        ("redis://h/three", "one number from 0 on"),
        ("redis://h/-1", "one number from 0 on"),
        ("redis://h/1?db=2", "one number from 0 on"),
        ("redis://h?db=", "one number from 0 on"),
        ("redis://h?db=1&db=2", "it takes db, each once"),
        ("redis://h?socket_timeout=1", "it takes db, each once"),
        ("redis://h?ssl_cert_reqs=none", "it takes db, each once"),
        ("unix:///s?virtual_host=3", "it takes db, each once"),
        ("unix://s?db=3", "by its whole path"),
        ("unix://", "by its whole path"),
        ("redis+sentinel://h1,h2", "comes the name of their master"),
        ("redis+sentinel://h1/a b/0", "comes the name of their master"),
        ("redis+sentinel://h1,,h2/m", "with commas between"),
        ("redis+sentinel:///m", "with commas between"),
        ("redis+sentinel://h1:0,h2/m", "the port is not a number"),
        ("redis+sentinel://h1/m/0/1", "one number from 0 on"),
        ("redis+sentinel://h1/m?ssl_cert_reqs=none", "it takes db, sentinel_username, sentinel_password, each once"),
        ("redis+sentinel://h1/m?sentinel_password=secret@x", "`/` as %2F"),
        ("redis://h1?sentinel_password=secret", "it takes db, each once"),
        ("rediss://h?ssl_cert_reqs=maybe", "one of required, optional, none"),
        ("rediss://h?ssl_check_hostname=1", "true or false"),
        ("rediss://h?ssl_ca_certs=/no/such.pem", "no file /no/such.pem"),
    ],
)
def test_unusable_redis_urls_are_refused(url: str, complaint: str) -> None:
    with pytest.raises(SettingError, match=r"^--redis-url: ") as refusal:
        parse_redis_url(url)
    assert complaint in str(refusal.value) and "secret" not in str(refusal.value)


@pytest.mark.parametrize("command", [["ps"], ["serve", "demo"], ["api"], ["maintenance"], ["engine", "demo"]])
def test_every_command_refuses_an_unusable_redis_url(command: list[str]) -> None:
    done = CliRunner().invoke(cli, [*command, "--redis-url", "redis://:p/w@h"], standalone_mode=False)
    assert isinstance(done.exception, SettingError) and done.exception.exit_code == 78


def test_a_password_is_never_shown() -> None:
    assert shown("redis_url", "redis://:p/w@h") == "redis://:***@h"
    assert shown("redis_url", "redis://user:a:b@c@h:1/0") == "redis://user:***@h:1/0"
    sentinels = "redis+sentinel://u:p@h1:1,h2:2/m/0?sentinel_password=p%26p&sentinel_username=s"
    assert shown("redis_url", sentinels) == "redis+sentinel://u:***@h1:1,h2:2/m/0?sentinel_password=***&sentinel_username=s"


def test_celery_works_in_the_database_that_was_named(redis_server: RedisServer) -> None:
    parsed = parse_redis_url(f"redis://127.0.0.1:{redis_server.port}?db=3")
    with broker(parsed.broker) as client, redis.Redis(port=redis_server.port, db=3) as third:
        client.set("by celery", "here")
        assert third.getdel("by celery") == b"here"


class Server(socketserver.ThreadingTCPServer):
    """On a free port, with a thread a connection; leaving it does not wait for clients to hang up."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, handler: type[socketserver.BaseRequestHandler]) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,))

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()


ANSWERS = {b"PING": b"+PONG\r\n", b"HELLO": b"%1\r\n+proto\r\n:3\r\n", b"CLIENT": b"+OK\r\n" * 2, b"SAVE": b"+OK\r\n"}


@pytest.fixture(scope="module")
def untrusted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """Port of a server with TLS that says OK, and its certificate, which no authority has signed."""
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    make = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    name = ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run([*make.split(), *name, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            try:
                with context.wrap_socket(self.request, server_side=True) as secured:
                    while asked := secured.recv(4096):
                        secured.sendall(b"".join(answer for word, answer in ANSWERS.items() if word in asked))
            except (ssl.SSLError, ConnectionError):
                pass  # the client would not have the certificate

    with Server(Answer) as server:
        yield server.server_address[1], certificate


def test_an_untrusted_certificate_is_refused_by_both(untrusted: tuple[int, Path]) -> None:
    parsed = parse_redis_url(f"rediss://localhost:{untrusted[0]}/0")
    with (
        redis.Redis.from_url(str(parsed)) as client,
        pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"),
    ):
        client.ping()
    with broker(parsed.broker) as client, pytest.raises(redis.exceptions.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
        client.ping()


async def test_an_untrusted_certificate_is_told_as_it_is_and_at_once(untrusted: tuple[int, Path]) -> None:
    url = str(parse_redis_url(f"rediss://localhost:{untrusted[0]}/0"))
    with Bus(url, patience=60.0) as bus:
        async with AsyncBus(url, patience=60.0) as abus:
            for error in (await failure(asyncio.to_thread(bus.run, accepts())), await failure(abus.run(accepts()))):
                assert error.trouble is Trouble.CERTIFICATE
    done = CliRunner().invoke(cli, ["ps", "--redis-url", url], standalone_mode=False)
    assert isinstance(done.exception, CommandError)
    assert "Redis has a certificate that is not trusted: " in str(done.exception)


async def failure(running: Awaitable[object]) -> BusUnavailable:
    with pytest.raises(BusUnavailable) as failed:
        await running
    return failed.value


@pytest.mark.parametrize("option", ["ssl_ca_certs={}", "ssl_cert_reqs=none"])
def test_a_certificate_can_be_trusted_by_name(untrusted: tuple[int, Path], option: str) -> None:
    port, certificate = untrusted
    parsed = parse_redis_url(f"rediss://localhost:{port}/0?{option.format(certificate)}")
    with broker(parsed.broker) as client:
        assert client.execute_command("SAVE")


class OldRedis(socketserver.StreamRequestHandler):
    """Answers like a Redis 6.2 that is asked for its version."""

    def handle(self) -> None:
        info = b"# Server\r\nredis_version:6.2.14\r\n"
        while line := self.rfile.readline():
            words = [self._word() for _ in range(int(line[1:]))]
            self.wfile.write(b"$%d\r\n%b\r\n" % (len(info), info) if words[0] == b"INFO" else b"+OK\r\n")

    def _word(self) -> bytes:
        return self.rfile.read(int(self.rfile.readline()[1:]) + 2)[:-2]


def test_a_redis_that_is_too_old_is_one_line_that_names_the_version() -> None:
    with Server(OldRedis) as server:
        for command in (["ps"], ["maintenance"]):
            url = f"redis://127.0.0.1:{server.server_address[1]}/0"
            done = CliRunner().invoke(cli, [*command, "--redis-url", url], standalone_mode=False)
            assert isinstance(done.exception, CommandError) and done.exception.exit_code == 78
            assert str(done.exception).endswith("the server is Redis 6.2.14; Redis 7.0 or newer is needed, or Valkey")


def test_a_database_that_is_not_there_is_one_line(redis_server: RedisServer) -> None:
    url = f"redis://127.0.0.1:{redis_server.port}/999"
    done = CliRunner().invoke(cli, ["ps", "--redis-url", url], standalone_mode=False)
    assert isinstance(done.exception, CommandError) and done.exception.exit_code == 78
    assert str(done.exception) == f"cannot use Redis at {url}: Redis: DB index is out of range"
