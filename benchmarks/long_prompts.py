"""What long prompts do to everybody else: gaps between tokens of running streams, first tokens of short prompts beside them.

    python -m benchmarks.long_prompts MODEL [--headrace=OPTIONS] [--prompts 4] [--tokens 7900] [--streams 4] [--every 3]

`--streams` requests decode before the long prompts come. These come one every `--every` seconds, so that engines that share cores
meet at work. Short prompts come one a second until the last long one is answered. All prompts are random token ids. Gaps between
tokens are counted while a long prompt is computed. Run it while nothing else runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import numpy as np

from benchmarks.served import MODEL_NAME, ServedError, headrace, running, stop_on_sigterm
from benchmarks.text_table import text_table

SHORT_TOKENS = 30
SHORT_SECONDS = 1.0  # from one short prompt to the next
LONG_OUTPUT, SHORT_OUTPUT = 4, 4
LONGEST_OUTPUT = 4000  # of streams, which are left when the last long prompt is answered


@dataclass
class Answer:
    """When a request was sent, and when each of its tokens came (monotonic seconds)."""

    sent: float
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds from the request to it."""
        return self.tokens[0] - self.sent

    def gaps_within(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of the gaps that end between two times."""
        return [after - before for before, after in zip(self.tokens, self.tokens[1:], strict=False) if begin < after <= end]


async def ask(client: httpx.AsyncClient, num_tokens: int, num_output: int, seed: int, answer: Answer) -> None:
    """Fills `answer` token by token. Raises ServedError."""
    prompt = np.random.default_rng(seed).integers(1000, 40_000, num_tokens).tolist()
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_output, "ignore_eos": True, "temperature": 0, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            raise ServedError(f"status {response.status_code}: {(await response.aread())[:300]!r}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ServedError(str(event["error"]))
                if event["choices"] and event["choices"][0]["finish_reason"] is None:  # the end has an event of its own
                    answer.tokens.append(time.monotonic())


@dataclass
class Measured:
    streams: list[Answer]
    long: list[Answer]
    short: list[Answer]


async def put_under(url: str, num_prompts: int, num_tokens: int, num_streams: int, every: float) -> Measured:
    """Raises ServedError."""
    found = Measured([], [], [])
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as client, asyncio.TaskGroup() as group:
        seeds = iter(range(1 << 20))

        def start(answers: list[Answer], num_tokens: int, num_output: int) -> asyncio.Task[None]:
            answers.append(Answer(time.monotonic()))
            return group.create_task(ask(client, num_tokens, num_output, next(seeds), answers[-1]))

        streams = [start(found.streams, SHORT_TOKENS, LONGEST_OUTPUT) for _ in range(num_streams)]
        while not all(len(stream.tokens) > 10 for stream in found.streams):
            await asyncio.sleep(0.05)

        async def start_long_ones() -> None:
            asked = []
            for _ in range(num_prompts):
                asked.append(start(found.long, num_tokens, LONG_OUTPUT))
                await asyncio.sleep(every)
            await asyncio.gather(*asked)

        waiting, short = group.create_task(start_long_ones()), list[asyncio.Task[None]]()
        while not (await asyncio.wait([waiting], timeout=SHORT_SECONDS))[0]:
            short.append(start(found.short, SHORT_TOKENS, SHORT_OUTPUT))
        await asyncio.gather(*short)
        for stream in streams:
            stream.cancel()
    return found


def show(found: Measured, num_tokens: int) -> None:
    begin, end = found.long[0].sent, max(answer.tokens[0] for answer in found.long)
    gaps = [gap for stream in found.streams for gap in stream.gaps_within(begin, end)]
    rows = [
        ["gap between tokens of a stream", *quantiles(gaps)],
        ["first token of a short prompt", *quantiles([answer.first_token for answer in found.short])],
        ["first token of a long prompt", *quantiles([answer.first_token for answer in found.long])],
    ]
    print(text_table(["seconds", "median", "p99", "most", "number"], rows))
    print(f"{len(found.long) * num_tokens / (end - begin):,.0f} tokens of long prompts a second")


def quantiles(values: Sequence[float]) -> list[str]:
    if not values:
        return ["", "", "", "0"]
    return [*(f"{np.quantile(values, share):.3f}" for share in (0.5, 0.99, 1.0)), str(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.long_prompts", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--headrace", default="", metavar="OPTIONS", help="options of `headrace serve`")
    parser.add_argument("--prompts", type=int, default=4, help="long ones")
    parser.add_argument("--tokens", type=int, default=7900, help="of a long prompt")
    parser.add_argument("--every", type=float, default=3.0, metavar="SECONDS", help="from one long prompt to the next")
    parser.add_argument("--streams", type=int, default=4, help="requests that decode beside them")
    options = parser.parse_args()
    stop_on_sigterm()
    longest = max(options.tokens + LONG_OUTPUT, SHORT_TOKENS + LONGEST_OUTPUT)
    with running(headrace(options.model, f"--max-model-len {longest} {options.headrace}")) as server:
        show(asyncio.run(put_under(server.url, options.prompts, options.tokens, options.streams, options.every)), options.tokens)


if __name__ == "__main__":
    main()
