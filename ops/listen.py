"""The listening socket that all API server processes share: bound once by the supervisor, inherited by each."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import socket
import ssl
import stat

from engine.config import ApiConfig
from ops.errors import CommandError, SettingError

BACKLOG = 2048


def bind(config: ApiConfig) -> socket.socket:
    """A listening socket on host and port, or on the Unix socket that was asked for. Raises SettingError for settings that cannot
    be, CommandError where the address is taken."""
    _check_certificate(config)
    if config.uds:
        return _bind_unix(config.uds)
    if not 0 <= config.port <= 65535:
        raise SettingError(f"--port must be between 0 and 65535, not {config.port}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host or None, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror:
        raise SettingError(f"cannot listen on {config.host}:{config.port}: no such address") from None
    if not config.asks_for_keys and not config.allow_no_auth and not ipaddress.ip_address(address[0]).is_loopback:
        raise SettingError(
            f"{config.host} can be reached from other machines: give an --api-key NAME=KEY or an --api-key-file, "
            "or allow it with --allow-no-auth"
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


def _check_certificate(config: ApiConfig) -> None:
    if not config.ssl_certfile and not config.ssl_keyfile:
        return
    if not config.ssl_certfile:
        raise SettingError("--ssl-keyfile needs --ssl-certfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(config.ssl_certfile, config.ssl_keyfile or None)
    except (OSError, ValueError) as error:  # an ssl.SSLError is an OSError
        raise SettingError(f"--ssl-certfile and --ssl-keyfile cannot be used: {error}") from None


def _bind_unix(path: str) -> socket.socket:
    """Remove the socket that an earlier server left at `path`, unless a process still listens there."""
    listener = socket.socket(socket.AF_UNIX)
    try:
        with contextlib.suppress(FileNotFoundError, ConnectionRefusedError), socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        if os.path.lexists(path) and stat.S_ISSOCK(os.lstat(path).st_mode):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise CommandError(
            f"cannot listen on {path}: {(error.strerror or str(error)).lower()}; choose another with --uds"
        ) from None
    return listener


def url_of(listener: socket.socket, config: ApiConfig) -> str:
    """The URL at which this machine reaches the socket; of a Unix socket its host means nothing."""
    scheme = "https" if config.ssl_certfile else "http"
    if listener.family == socket.AF_UNIX:
        return f"{scheme}://localhost"
    host, port = listener.getsockname()[:2]
    address = ipaddress.ip_address(host)
    if address.is_unspecified:
        host = "::1" if address.version == 6 else "127.0.0.1"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
