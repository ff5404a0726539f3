"""Asks a server of this machine whether it is there. `serve` asks while it starts; to load an HTTP client would take too long."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from urllib.parse import urlsplit

SECONDS = 2.0  # for an answer
LONGEST_LINE = 1024


async def status_of(url: str, path: str, uds: str = "") -> int | None:
    """The status with which the HTTP server at `url`, or at the Unix socket `uds`, answers GET `path`; None: it does not answer."""
    with suppress(OSError, ValueError, IndexError, TimeoutError):
        async with asyncio.timeout(SECONDS):
            line = await _first_line(url, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", uds)
            return int(line.split()[1])
    return None


async def ping(port: int, password: str) -> bool:
    """Whether the Redis on this port answers a PING, its data loaded."""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(f"AUTH {password}\r\nPING\r\n".encode())
                return [await reader.readline(), await reader.readline()] == [b"+OK\r\n", b"+PONG\r\n"]
            finally:
                writer.close()
    return False


async def _first_line(url: str, request: str, uds: str) -> bytes:
    address = urlsplit(url)
    context = None
    if address.scheme == "https":
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # its certificate names another host
    if uds:
        reader, writer = await asyncio.open_unix_connection(uds, limit=LONGEST_LINE, ssl=context, server_hostname=context and "")
    else:
        reader, writer = await asyncio.open_connection(address.hostname, address.port, limit=LONGEST_LINE, ssl=context)
    try:
        writer.write(request.encode())
        return await reader.readline()
    finally:
        writer.close()
