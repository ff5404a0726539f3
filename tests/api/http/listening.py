"""An application behind a real socket: uvicorn with this project's connections, on a free port, in the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.server import ServerState

from api.http.protocol import Connection


@asynccontextmanager
async def listening(app: ASGIApp, request_timeout: float = 60.0, **more: Any) -> AsyncIterator[int]:
    """The port. `more`: for the connections."""
    config = uvicorn.Config(app, ws="none", log_config=None, access_log=False, timeout_keep_alive=1)
    config.load()
    state = ServerState()
    protocol = partial(Connection, request_timeout=request_timeout, config=config, server_state=state, app_state={}, **more)
    server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    for connection in list(state.connections):
        connection.transport.close()
    await asyncio.gather(*state.tasks)
