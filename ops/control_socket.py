"""How a command reaches a running `serve`: a socket that only the user who started it, or root, may use.

It is named after the process, in Linux' abstract namespace, so that no file is left behind. The command sends one JSON object. The
answer is one JSON object a line: {"said": ...} while it works, then {"done": true} or {"error": ...}.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

from ops.errors import CommandError

log = logging.getLogger(__name__)

Say = Callable[[str], None]
Obey = Callable[[dict[str, Any], Say], Awaitable[None]]
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: unix(7), SO_PEERCRED


def _address(pid: int) -> str:
    return f"\0headrace-serve-{pid}"


async def listen(obey: Obey) -> asyncio.AbstractServer:
    """Listens for commands to this process; `obey` does one and may say how far it is. It raises CommandError."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        def send(message: dict[str, Any]) -> None:
            writer.write(json.dumps(message).encode() + b"\n")

        try:
            _, user, _ = _CREDENTIALS.unpack(
                writer.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            if user not in (0, os.geteuid()):
                raise CommandError("this `serve` is another user's")
            await obey(json.loads(await reader.readline()), lambda text: send({"said": text}))
            send({"done": True})
        except CommandError as error:
            send({"error": str(error)})
        except Exception as error:
            log.exception("a command could not be obeyed")
            send({"error": f"{type(error).__name__}: {error}"})
        finally:
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

    return await asyncio.start_unix_server(answer, _address(os.getpid()))


def ask(pid: int, command: dict[str, Any], say: Say) -> None:
    """Have the `serve` that runs as process `pid` obey; returns when it has. Raises CommandError where it cannot."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(_address(pid))
        except OSError as error:
            raise CommandError(f"process {pid} is no `headrace serve` that can be reached: {error.strerror}") from None
        connection.sendall(json.dumps(command).encode() + b"\n")
        for line in connection.makefile():
            answer = json.loads(line)
            if "said" in answer:
                say(answer["said"])
            elif "error" in answer:
                raise CommandError(answer["error"])
            else:
                return
    raise CommandError(f"`headrace serve` (process {pid}) ended before the command was done")
