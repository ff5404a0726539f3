"""CPU time of an API server process for each token: headrace's, and vLLM's beside it, both fed the same recorded outputs.

    python -m benchmarks.frontend [MODEL] [--peers-dir DIR] [--streams 256] [--tokens 512] [--requests 1] [--rounds 3]

Streams of completions run side by side, each the next as soon as one ends. Everything but the model is real: Redis, engine,
scheduler, API server; a recording of English text, by MODEL's tokenizer, stands where the model was (`benchmarks/replay/`). A
step's tokens go out when the client has an event for each token of the step before, so that on both servers every token is an
event of its own; the benchmark fails where one is not. It counts the CPU time of the API process, all its threads, from the first
request to the last event: HTTP, validation, sampling parameters, tokens to text and events are in it; client, engine
and Redis are not.

DIR holds `vllm/` (a venv with vLLM's CPU build) and `models/smollm2-hf`, then the default MODEL. Without it headrace runs alone.
The servers take turns, round by round. Tokens a CPU second are what an API process delivers when it has a core to itself; tokens a
second, in the rounds, what came with the waits of the gate and with other processes on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
from tokenizers import Tokenizer

from benchmarks.replay.headrace_engine import NAME
from benchmarks.replay.recording import GATE, RECORDING
from benchmarks.served import Server, peers, running, stop_on_sigterm
from gpu.checkpoint.tokenizer_files import load_tokenizer_files
from ops.demo import fetch_demo
from ops.embedded import DataDirectory, EmbeddedValkey

ROOT = Path(__file__).resolve().parent.parent
TEXTS = ("README.md", "docs/architecture.md", "docs/operating.md", "docs/kernels.md", "docs/http-api.md")
PROMPT_TOKENS = 32
PATIENCE = 300.0  # seconds for one round of all streams
LOOK_SECONDS = 0.002  # between the client's looks at its sockets


@dataclass
class Run:
    """One round of one server."""

    tokens: int
    user: float  # CPU seconds of the API process
    system: float  # CPU seconds of the kernel for it: the sending of each event is most of them
    seconds: float  # that passed, the client's, the engine's and the gate's time included

    @property
    def cpu_seconds(self) -> float:
        return self.user + self.system

    @property
    def cpu_per_million(self) -> float:
        return 1e6 * self.cpu_seconds / self.tokens

    def row(self) -> str:
        user, system = 1e6 * self.user / self.tokens, 1e6 * self.system / self.tokens
        rate, share = self.tokens / self.seconds, self.cpu_seconds / self.seconds
        return f"{rate:,.0f} tokens/s, {user:.1f} + {system:.1f} CPU s a million (user + system), {share:.0%} of a core"


def record(model: Path, path: Path) -> None:
    """Token ids of plain English at `path`. A token that shows no text by itself would be no event: only ASCII ones are kept."""
    tokenizer = Tokenizer.from_str(load_tokenizer_files(model).tokenizer_json)
    text = "\n".join((ROOT / name).read_text() for name in TEXTS)
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    path.write_text(json.dumps([each for each in ids if tokenizer.decode([each]).isascii() and tokenizer.decode([each])]))


class Stream:
    """One keep-alive connection that asks for `num_requests` completions, one after the other, and counts what comes."""

    def __init__(self, port: int, index: int, num_requests: int, num_tokens: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.left = num_requests
        body = {
            "model": NAME, "prompt": [1000 + index + step for step in range(PROMPT_TOKENS)], "max_tokens": num_tokens,
            "ignore_eos": True, "stream": True, "temperature": 0,
        }  # fmt: skip
        content = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
        self._rest = b""
        self.socket.sendall(self._request)

    def receive(self) -> int:
        """Events with text that have come. Raises ConnectionError when the server hung up."""
        received = self.socket.recv(1 << 16)
        if not received:
            raise ConnectionError(f"the server hung up behind {self._rest!r}")
        data = self._rest + received
        end = data.rfind(b"\n\n") + 2
        if end < 2:
            self._rest = data
            return 0
        whole, self._rest = data[:end], data[end:]
        if b"data: [DONE]" in whole:
            self._end()
        return whole.count(b'"text":"') - whole.count(b'"text":""')

    def _end(self) -> None:
        self.left -= 1
        if self.left:
            self.socket.sendall(self._request)
        else:
            self.socket.close()


class Gate:
    """The client's end of an engine's gate: opens to a step when all tokens announced before it have come as events."""

    def __init__(self, path: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(path)
        self.listener.listen()
        self._engine: socket.socket | None = None
        self._announced = 0
        self._waiting = 0  # tokens of the step at the gate

    def look(self, num_events: int) -> None:
        """Called again and again with the number of all events so far."""
        if self._engine is None:
            self._engine, _ = self.listener.accept()
            self._engine.setblocking(False)
        if not self._waiting:
            with contextlib.suppress(BlockingIOError):
                (self._waiting,) = struct.unpack("<i", self._engine.recv(4))
        if self._waiting and num_events >= self._announced:
            self._announced += self._waiting
            self._waiting = 0
            self._engine.send(b"\0")


@dataclass
class Fed:
    """A server that stands, with an engine that plays the recording."""

    name: str
    port: int
    api: psutil.Process
    gate: Gate
    num_events: int = 0  # of all loads so far

    def load(self, streams: int, tokens: int, requests: int) -> int:
        """Events with text that came; raises TimeoutError, ConnectionError.

        The client looks at its sockets from time to time. Were it woken by each event, then on few cores it would take the server's
        away in the middle of a step, once a token, and what the server costs could not be told from what that costs.
        """
        before, deadline = self.num_events, time.monotonic() + PATIENCE
        made = {stream.socket.fileno(): stream for stream in (Stream(self.port, i, requests, tokens) for i in range(streams))}
        with select.epoll() as arrived:
            for descriptor in made:
                arrived.register(descriptor, select.EPOLLIN)
            while made:
                time.sleep(LOOK_SECONDS)
                for descriptor, _ in arrived.poll(0):
                    self.num_events += made[descriptor].receive()
                    if not made[descriptor].left:
                        del made[descriptor]
                self.gate.look(self.num_events)
                if time.monotonic() > deadline:
                    raise TimeoutError(f"{self.name}: {len(made)} streams have not ended")
        return self.num_events - before


@contextlib.contextmanager
def headrace(model: Path, recording: Path, options: argparse.Namespace) -> Iterator[Fed]:
    """Redis, engine and API server, each a process."""
    with contextlib.ExitStack() as stack:
        gate, environment = gated("headrace", recording)
        directory = DataDirectory(str(recording.with_name("data")))
        stack.callback(directory.close)
        valkey = EmbeddedValkey(directory)
        for arguments in (
            valkey.command().arguments,
            [sys.executable, "-m", "benchmarks.replay.headrace_engine", str(model), valkey.url, str(options.streams)],
        ):
            process = subprocess.Popen(arguments, cwd=ROOT, env={**os.environ, **environment}, pass_fds=(directory.lock,))
            stack.callback(end, process)
        command = [sys.executable, "-P", "-m", "ops.cli", "api", "--redis-url", valkey.url, "--port", "{port}"]
        at = stack.enter_context(running(Server("headrace", command)))
        yield Fed("headrace", port_of(at.url), at.root, gate)


@contextlib.contextmanager
def vllm(model: Path, recording: Path, options: argparse.Namespace) -> Iterator[Fed]:
    """vLLM's API server, and the engine process that it starts."""
    gate, environment = gated("vllm", recording)
    peer = next(each for each in peers(options.peers_dir) if each.name == "vllm")
    python = f"{options.peers_dir}/vllm/bin/python"
    flags = f"--served-model-name {NAME} --max-model-len 1024 --max-num-seqs {options.streams} --max-num-batched-tokens 8192"
    command = [python, str(ROOT / "benchmarks/replay/vllm_server.py"), "--model", str(model), "--host", "127.0.0.1"]
    command += ["--port", "{port}", *flags.split(), "--no-async-scheduling"]
    with running(Server("vllm", command, {**peer.environment, **environment})) as at:
        yield Fed("vllm", port_of(at.url), at.root, gate)


def gated(name: str, recording: Path) -> tuple[Gate, dict[str, str]]:
    """A gate for one engine, and the environment that tells the engine of it."""
    path = str(recording.with_name(f"{name}.gate"))
    return Gate(path), {RECORDING: str(recording), GATE: path}


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait()


def port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def measure(server: Fed, options: argparse.Namespace) -> Run:
    before, since = server.api.cpu_times(), time.perf_counter()
    events = server.load(options.streams, options.tokens, options.requests)
    after, seconds = server.api.cpu_times(), time.perf_counter() - since
    tokens = options.streams * options.tokens * options.requests
    if events != tokens:
        sys.exit(f"{server.name} sent {events} events for {tokens} tokens: this is no comparison")
    return Run(tokens, after.user - before.user, after.system - before.system, seconds)


def compare(options: argparse.Namespace) -> dict[str, list[Run]]:
    model = Path(options.model or (f"{options.peers_dir}/models/smollm2-hf" if options.peers_dir else fetch_demo()))
    makers = {"headrace": headrace} | ({"vllm": vllm} if options.peers_dir else {})
    results: dict[str, list[Run]] = {}
    with contextlib.ExitStack() as stack:
        recording = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "recording.json"
        record(model, recording)
        chosen = [
            stack.enter_context(make(model, recording, options))
            for name, make in makers.items()
            if not options.only or name == options.only
        ]
        for server in chosen:
            server.load(options.streams, 4, 1)  # connections, imports and caches are warm then
        for number in range(1, options.rounds + 1):
            for server in chosen:
                run = measure(server, options)
                results.setdefault(server.name, []).append(run)
                print(f"round {number}, {server.name}: {run.row()}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a model directory or a GGUF file, for its tokenizer; default: the demo model")
    parser.add_argument("--peers-dir", type=Path)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512, help="of each request's output")
    parser.add_argument("--requests", type=int, default=1, help="of each stream, one after the other")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("headrace", "vllm"))
    options = parser.parse_args()
    stop_on_sigterm()
    results = compare(options)
    costs = {name: statistics.median(run.cpu_per_million for run in runs) for name, runs in results.items()}
    print(
        f"\n{options.streams} streams, {options.tokens} tokens each request, one event a token; medians of {options.rounds} rounds"
    )
    for name, cost in costs.items():
        print(f"{name:10} {cost:8.1f} CPU seconds a million tokens, {1e6 / cost:10,.0f} tokens a CPU second")
    if len(costs) == 2:
        print(f"tokens a CPU second, headrace's over vLLM's: {costs['vllm'] / costs['headrace']:.2f}")


if __name__ == "__main__":
    main()
