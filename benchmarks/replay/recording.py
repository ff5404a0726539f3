"""A recording in place of a model, and the gate that keeps its steps apart: what both servers' engines share in `frontend`.

Standard library alone, because two interpreters import it.
"""

from __future__ import annotations

import json
import os
import socket
import struct

STRIDE = 41  # recorded tokens between the beginnings of two requests' outputs
PATIENCE = 60.0  # seconds that a step may take to reach the client
RECORDING, GATE = "HEADRACE_REPLAY_RECORDING", "HEADRACE_REPLAY_GATE"  # environment variables: paths of a file and a socket


class Recording:
    """Token ids of a text, in a JSON list. The first token of a request's prompt says where in it the request's output begins."""

    def __init__(self) -> None:
        with open(os.environ[RECORDING]) as file:
            self.token_ids: list[int] = json.load(file)

    def token(self, first_prompt_token: int, offset: int) -> int:
        """Output token number `offset` of a request."""
        return self.token_ids[(first_prompt_token * STRIDE + offset) % len(self.token_ids)]


class Gate:
    """The engine's end: a step's tokens go out when the client has had an event for each token of the steps before.

    So no server can merge two steps into one event, and both send the same number of events.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(PATIENCE)
        self._socket.connect(os.environ[GATE])

    def announce(self, num_tokens: int) -> None:
        """Blocks until `num_tokens` more may go out; raises TimeoutError when the ones before do not arrive."""
        if num_tokens:
            self._socket.sendall(struct.pack("<i", num_tokens))
            if not self._socket.recv(1):
                raise ConnectionError("the client of the benchmark is gone")
