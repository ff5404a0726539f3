"""A request with extreme fields ends at most itself: against the real model behind `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections import deque
from pathlib import Path

import httpx
import pytest

from tests.ops.extremes import NOTHING_TO_SAMPLE, Extreme, Extremes
from tests.ops.serving import Serving, serving
from tests.waiting import wait_for_async

AT_ONCE = 24
LONGEST_SECONDS = 60.0  # that any one request may take
SETTLE_SECONDS = 20.0
CONTEXT = 256  # tokens: a request without a limit ends soon


class Fuzz:
    """Sends extremes for a while and keeps what must not be: each with the request that caused it."""

    def __init__(self, server: Serving, seed: int) -> None:
        self.server, self.seed = server, seed
        self.extremes = Extremes(seed)
        self.statuses: dict[int, int] = {}
        self.faults: list[str] = []
        self.last: deque[Extreme] = deque(maxlen=2 * AT_ONCE)  # the suspects, should a process end

    async def run(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=2 * AT_ONCE)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_SECONDS, limits=limits) as http:
            others = asyncio.gather(*(self._send_until(deadline, http) for _ in range(AT_ONCE)))
            for extreme in NOTHING_TO_SAMPLE:
                await self._send(extreme, http, expected=400)
            await others
            await self._settled(http)

    async def _send_until(self, deadline: float, http: httpx.AsyncClient) -> None:
        while time.monotonic() < deadline and len(self.faults) < 10:
            extreme = next(self.extremes)
            self.last.append(extreme)
            try:
                if extreme.leaves_after is None:
                    await self._send(extreme, http)
                else:
                    await self._send_and_leave(extreme, extreme.leaves_after)
            except httpx.HTTPError as error:
                self._fault(extreme, f"{type(error).__name__}: {error}")

    async def _send_and_leave(self, extreme: Extreme, seconds: float) -> None:
        """By a client of its own: a pool loses connections whose requests are cancelled."""
        async with httpx.AsyncClient(base_url=self.server.url, timeout=LONGEST_SECONDS) as http:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._send(extreme, http)

    async def _send(self, extreme: Extreme, http: httpx.AsyncClient, expected: int | None = None) -> None:
        content = extreme.body.encode(errors="surrogatepass")
        answer = await http.post(extreme.path, content=content, headers={"Content-Type": "application/json"})
        self.statuses[answer.status_code] = self.statuses.get(answer.status_code, 0) + 1
        if answer.status_code >= 500 or expected not in (None, answer.status_code):
            self._fault(extreme, f"{answer.status_code} {answer.text[:300]}")
        elif answer.headers["content-type"].startswith("text/event-stream"):
            self._check_stream(extreme, answer.text)
        elif answer.status_code != 200 and answer.json()["error"]["code"] != answer.status_code:
            self._fault(extreme, f"{answer.status_code} {answer.text[:300]}")
        else:
            json.loads(answer.text, parse_constant=lambda name: self._fault(extreme, f"{name} is no JSON"))

    def _check_stream(self, extreme: Extreme, text: str) -> None:
        payloads = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        if not payloads or payloads[-1] != "[DONE]":
            self._fault(extreme, f"a stream ends with {payloads[-1:]}")
        for payload in payloads[:-1]:
            event = json.loads(payload, parse_constant=lambda name: self._fault(extreme, f"{name} is no JSON"))
            if "error" in event and event["error"]["code"] >= 500:
                self._fault(extreme, payload[:300])

    def _fault(self, extreme: Extreme, what: str) -> None:
        self.faults.append(f"{what}\n    {extreme.path} {extreme.body[:1000]}")

    async def _settled(self, http: httpx.AsyncClient) -> None:
        """Nothing is left running, and all KV blocks are free."""
        used: list[str] = []

        async def nothing_is_left() -> bool:
            nonlocal used
            listed = [json.dumps(request) for request in (await http.get("/v1/requests")).json()["data"]]
            lines = (await http.get("/metrics")).text.splitlines()
            gauges = ("vllm:kv_cache_usage_perc", "vllm:num_requests_")
            used = listed + [line for line in lines if line.startswith(gauges) and not line.endswith(" 0.0")]
            return not used

        try:
            await wait_for_async(nothing_is_left, lambda: f"nothing is left: {used[:5]}", SETTLE_SECONDS, pause=0.1)
        except AssertionError as error:  # told beside the other faults
            self.faults.append(str(error))


async def check(model: Path, data_dir: Path, seed: int, seconds: float) -> None:
    with serving(str(model), "--max-model-len", str(CONTEXT), "--data-parallel-size", "1", data_dir=data_dir) as server:
        before = {process.pid for process in server.family()}
        fuzz = Fuzz(server, seed)
        await fuzz.run(seconds)
        ended = before - {process.pid for process in server.family()}
        print(f"seed {seed}: {dict(sorted(fuzz.statuses.items()))}")
        suspects = "\n".join(f"{extreme.path} {extreme.body[:1000]}" for extreme in fuzz.last)
        assert not ended, f"processes {ended} ended, seed {seed}; the last requests were\n{suspects}\n{server.log[-5000:]}"
        assert not fuzz.faults, f"seed {seed}:\n" + "\n".join(fuzz.faults)
        assert "Traceback" not in server.log, server.log[-5000:]
        assert fuzz.statuses.get(200, 0) > 10 and fuzz.statuses.get(400, 0) > 10


async def test_extreme_requests_end_only_themselves(smollm2_gguf: Path, tmp_path: Path) -> None:
    await check(smollm2_gguf, tmp_path, seed=1, seconds=8)


@pytest.mark.soak
@pytest.mark.timeout(1200)
async def test_extreme_requests_for_ten_minutes(smollm2_gguf: Path, tmp_path: Path) -> None:
    """FUZZ_SEED and FUZZ_SECONDS repeat or shorten a run."""
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns() % 10**6))
    await check(smollm2_gguf, tmp_path, seed, float(os.environ.get("FUZZ_SECONDS", 600)))
