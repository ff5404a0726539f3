"""Many requests at a small engine: where each waits is told by its state and by metrics, and what was counted agrees in the end."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx

from engine.bus.connection import Bus
from ops.usage import usage_rows
from tests.api.conftest import KEYS
from tests.api.live_server import LiveServer
from tests.api.metrics.test_metrics import samples
from tests.waiting import wait_for, wait_for_async

ADMIN = {"Authorization": f"Bearer {KEYS['ops']}"}
NUM_REQUESTS, SEATS, PROMPT = 20, 8, list(range(300, 310))
PROMPT_TOKENS = ("request_prompt_tokens_sum", "prompt_tokens_total")


def totals(text: str) -> Counter[str]:
    """Sums over all labels, by name without its prefix."""
    found: Counter[str] = Counter()
    for (name, labels), value in samples(text).items():
        if "le" not in dict(labels):
            found[name.removeprefix("headrace:")] += int(value)
    return found


def used_tokens(server: LiveServer) -> int:
    with Bus(server.redis.url) as bus:
        return sum(row.totals.prompt_tokens for row in usage_rows(bus))


async def test_the_backlog_is_seen_and_prompts_count_alike(slow_server: LiveServer) -> None:
    async with httpx.AsyncClient(base_url=slow_server.url, timeout=60, headers=ADMIN) as http:

        async def scrape() -> Counter[str]:
            return totals((await http.get("/metrics")).text)

        async def complete(max_tokens: int) -> None:
            await http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": max_tokens})

        async def by_state() -> dict[str, list[str]]:
            states: dict[str, list[str]] = {"queued": [], "waiting": [], "running": []}
            for listed in (await http.get("/v1/requests")).json()["data"]:
                states[listed["state"]].append(listed["id"])
            return states

        async def settled() -> dict[str, list[str]] | None:
            states = await by_state()
            all_run_that_may = len(states["running"]) >= SEATS - 1  # one seat may be kept for other tenants
            all_are_there = all_run_that_may and sum(map(len, states.values())) == NUM_REQUESTS
            return states if all_are_there and states["queued"] else None

        before, used_before = await scrape(), used_tokens(slow_server)
        asked = [asyncio.create_task(complete(1500)) for _ in range(NUM_REQUESTS)]

        async def told_alike() -> tuple[dict[str, list[str]], Counter[str]] | None:
            """Where the requests are and what the engine said last, once these agree: the seat that is kept becomes free."""
            states = await settled()
            seen = await scrape()
            places = (seen["num_requests_running"], seen["num_requests_waiting"])
            num_running = len(states["running"]) if states is not None else -1
            return (states, seen) if states is not None and places == (num_running, NUM_REQUESTS - num_running) else None

        alike = await wait_for_async(told_alike, "all requests in their places, and the engine's next word")
        assert alike is not None
        states, seen = alike
        num_running = len(states["running"])
        assert seen["num_requests_waiting_by_reason"] == NUM_REQUESTS - num_running
        assert seen["num_prompt_tokens_queued"] == len(PROMPT) * len(states["queued"])

        for request_id in (*states["queued"], *states["waiting"], *states["running"]):
            assert (await http.post(f"/v1/requests/{request_id}/cancel")).status_code == 200
        await asyncio.gather(*asked)
        await complete(3)
        answered = len(PROMPT) * (num_running + 1)

        async def told() -> bool:
            now = await scrape()
            return all(now[name] - before[name] == answered for name in PROMPT_TOKENS)

        await wait_for_async(told, "the prompts of what was answered")
        assert used_tokens(slow_server) - used_before == answered
        after = await scrape()
        assert after["num_requests_waiting"] == after["num_requests_running"] == after["num_prompt_tokens_queued"] == 0
        assert after["request_success_total"] - before["request_success_total"] == NUM_REQUESTS + 1


def test_an_engines_counters_are_complete_half_a_second_after_the_last_answer(null_server: LiveServer) -> None:
    def sizes() -> int:
        return totals(null_server.http.get("/metrics").text)["iteration_tokens_total_sum"]

    for _ in range(5):  # each at another time between two heartbeats
        before = sizes()
        for _ in range(3):
            body = {"prompt": list(range(300, 306)), "max_tokens": 10, "ignore_eos": True}
            assert null_server.http.post("/v1/completions", json=body).status_code == 200
        wait_for(lambda before=before: sizes() - before == 3 * (6 + 10), "all steps", seconds=0.5)
