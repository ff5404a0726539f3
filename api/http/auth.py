"""Who asks: the holder of an API key. Without keys every client may do everything, so headrace then binds to loopback only."""

from __future__ import annotations

import hashlib
import ipaddress
import socket

from starlette.types import ASGIApp, Receive, Scope, Send

from api.errors import ConfigurationError, Unauthorized, error_response
from api.http.headers import header, route_path
from api.http.key_ring import KeyRing, Principal
from engine.config import ApiConfig

OPEN_PATHS = frozenset({"/health", "/live", "/ready", "/version", "/ping", "/metrics"})  # probes and scrapers carry no key
API_KEY_HEADER = b"x-api-key"  # in which Anthropic's clients send it
SALT_LEN = 32  # hex digits: 128 bits


def derive_cache_salt(principal: Principal, salt: str | None) -> str:
    """The prefix cache's salt. It depends on the tenant for every body, so that no tenant can probe another's prompts."""
    if not principal.tenant:
        return salt or ""
    return hashlib.sha256(f"{principal.tenant}\0{salt or ''}".encode()).hexdigest()[:SALT_LEN]


def check_exposure(config: ApiConfig) -> None:
    """Raises ConfigurationError where the network could use a server without keys."""
    if config.asks_for_keys or config.allow_no_auth or config.uds or _is_loopback(config.host):
        return
    raise ConfigurationError(
        f"refusing to listen on {config.host or 'all addresses'} without API keys: give --api-key NAME=KEY or --api-key-file, "
        "listen on 127.0.0.1, or allow it with --allow-no-auth"
    )


def _is_loopback(host: str) -> bool:
    """Whether every address that `host` stands for is this machine's own; "" stands for all of them."""
    try:
        found = socket.getaddrinfo(host or None, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError):
        return False
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)


class Authentication:
    """ASGI middleware: puts the `Principal` into the scope's state, or answers 401."""

    def __init__(self, app: ASGIApp, keys: KeyRing) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            principal = self._keys.identify(header(scope, b"authorization"), header(scope, API_KEY_HEADER))
            if principal is None and route_path(scope) not in OPEN_PATHS and scope["method"] != "OPTIONS":
                error = Unauthorized("Invalid or missing API key.", headers={"WWW-Authenticate": "Bearer"})
                await error_response(error)(scope, receive, send)
                return
            scope.setdefault("state", {})["principal"] = principal
        await self._app(scope, receive, send)
