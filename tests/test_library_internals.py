"""What headrace uses of other libraries beyond their public interface. A library that is named here has an upper bound in
pyproject.toml: to raise it, run this with the new version."""

from __future__ import annotations

import ast
import inspect
import textwrap
import tomllib
from importlib.metadata import version
from pathlib import Path

import celery.apps.worker
import celery.beat
import kombu.transport.redis
import prometheus_client
import pytest
import redis.asyncio.connection
import redis.connection
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import Server

# class -> methods and attributes of its instances, and where they are used
RELIED_ON: dict[type, set[str]] = {
    # engine/bus/pipeline.py takes the socket of a connection that redis-py has opened
    redis.asyncio.connection.AbstractConnection: {
        "_writer", "_close", "connect", "disconnect", "driver_info", "on_connect", "read_response", "redis_connect_func",
        "send_command",
    },
    # engine/bus/connection.py: subscriptions; engine/bus/handshake.py, for asyncio too; ops/broker.py
    redis.connection.AbstractConnection: {
        "can_read", "connect", "disconnect", "driver_info", "on_connect", "read_response", "redis_connect_func", "send_command",
    },
    redis.connection.ConnectionPool: {"make_connection"},
    redis.asyncio.connection.ConnectionPool: {"make_connection"},
    # ops/broker.py
    kombu.transport.redis.Channel: {"_connparams", "client", "close"},
    # ops/beat.py
    celery.beat.Scheduler: {"apply_async", "apply_entry"},
    # api/http/protocol.py
    HttpToolsProtocol: {
        "_unset_keepalive_if_required", "cycle", "data_received", "flow", "headers", "loop", "on_body", "on_headers_complete",
        "on_message_begin", "on_message_complete", "parser", "scope", "timeout_keep_alive_handler", "transport", "url",
    },
    # api/http/response_writer.py
    RequestResponseCycle: {
        "chunked_encoding", "disconnected", "flow", "keep_alive", "message_event", "response_complete", "response_started", "scope",
        "transport",
    },
    # api/server.py
    Server: {"capture_signals", "force_exit", "should_exit"},
    # api/metrics/buffered.py
    prometheus_client.Histogram: {"_buckets", "_sum"},
}  # fmt: skip
LIBRARIES = ("celery", "kombu", "prometheus-client", "redis", "uvicorn")


def names_of(kind: type) -> set[str]:
    """Methods, class attributes, and what is assigned to `self` anywhere in the class or those that it is made of."""
    found: set[str] = set()
    for each in kind.__mro__[:-1]:
        found |= set(vars(each))
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(each)))):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
                found.add(node.attr)
    return found


@pytest.mark.parametrize("kind", RELIED_ON, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_attributes_that_headrace_relies_on_exist(kind: type) -> None:
    assert not RELIED_ON[kind] - names_of(kind)


def test_module_names_that_headrace_relies_on_exist() -> None:
    assert STATUS_LINE[200].startswith(b"HTTP/1.1 200 ")
    assert callable(celery.apps.worker.safe_say)  # ops/roles.py puts a logger in its place
    assert {"redis", "rediss"} <= set(kombu.transport.TRANSPORT_ALIASES)  # ops/broker.py names its own transport there


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_library_with_used_internals_has_an_upper_bound(library: str) -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    (requirement,) = (each for each in map(Requirement, project["dependencies"]) if each.name == library)
    assert any(bound.operator == "<" for bound in requirement.specifier)
    assert requirement.specifier.contains(version(library))
