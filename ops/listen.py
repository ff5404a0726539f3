"""The listening socket that all API server processes share: bound once by the supervisor, inherited by each."""

from __future__ import annotations

import ipaddress
import socket

from engine.config import ApiConfig
from ops.errors import CommandError, SettingError

BACKLOG = 2048


def bind(config: ApiConfig) -> socket.socket:
    """A listening socket on host and port. Raises SettingError where keys are missing, CommandError where the address is taken."""
    if not 0 <= config.port <= 65535:
        raise SettingError(f"--port must be between 0 and 65535, not {config.port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise SettingError(f"cannot listen on {config.host}:{config.port}: no such address") from None
    if not config.api_key and not config.allow_no_auth and not ipaddress.ip_address(address[0]).is_loopback:
        raise SettingError(
            f"{config.host} can be reached from other machines: give an --api-key NAME=KEY, or allow it with --allow-no-auth"
        )
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        reason = (error.strerror or str(error)).lower()
        raise CommandError(
            f"cannot listen on {config.host}:{config.port}: {reason}; choose another with --port or --host"
        ) from None
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL at which this machine reaches the socket."""
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
