"""A TCP proxy in front of Redis that can lose an answer: the request is carried out, the connection breaks before the reply."""

from __future__ import annotations

import socket
import threading
from contextlib import suppress
from urllib.parse import urlsplit


class LossyProxy:
    def __init__(self, url: str) -> None:
        self.lead_to(url)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"
        self.losses = 0  # answers to lose from now on
        self.about = b""  # only of requests that contain this
        self._last_request = b""
        self.lost = 0
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def lead_to(self, url: str) -> None:
        """The server of connections that come from now on."""
        parts = urlsplit(url)
        self._target = (parts.hostname, parts.port)

    def __enter__(self) -> LossyProxy:
        return self

    def __exit__(self, *exception: object) -> None:
        for each in [self._listener, *self._sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(target=work, args=arguments)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                self._spawn(self._carry, client, server, False)
                self._spawn(self._carry, server, client, True)

    def _carry(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while payload := source.recv(1 << 16):
                if not answers:
                    self._last_request = payload
                elif self.losses > 0 and self.about in self._last_request:
                    self.losses -= 1
                    self.lost += 1
                    break
                sink.sendall(payload)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
