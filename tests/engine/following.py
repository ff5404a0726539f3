"""A receiver of a stream that a test reads at its own pace."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from engine.client.request_stream import RequestStream
from engine.protocol import FinishedOutput, OutputLogprobs, OutputPromptLogprobs


@dataclass
class Follower:
    """All that came for one request. `stop`: by choice, the token that a stop string ends with."""

    stop: dict[int, int] = field(default_factory=dict)
    prompt_logprobs: list[OutputPromptLogprobs] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: list[OutputLogprobs] = field(default_factory=list)
    ends: dict[int, FinishedOutput] = field(default_factory=dict)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    stream: RequestStream = field(init=False)

    @property
    def request_id(self) -> str:
        return self.stream.request_id

    def abort(self) -> None:
        self.stream.abort()

    def take_prompt_logprobs(self, part: OutputPromptLogprobs) -> None:
        self.prompt_logprobs.append(part)

    def take_token(self, choice: int, token_id: int, logprobs: OutputLogprobs | None) -> str | None:
        assert choice not in self.ends, "output after the end"
        self.tokens.setdefault(choice, []).append(token_id)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        self._changed.set()
        return "END" if len(self.tokens[choice]) == self.stop.get(choice) else None

    def take_end(self, choice: int, end: FinishedOutput) -> None:
        assert choice not in self.ends, "a second end"
        self.ends[choice] = end
        self._changed.set()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def has_tokens(self, count: int = 1) -> None:
        """Returns when `count` tokens have come."""
        await self._until(lambda: self.num_tokens >= count)

    async def whole(self, n: int = 1) -> tuple[list[list[int]], list[FinishedOutput]]:
        """Tokens and end of each of `n` choices, once all have ended."""
        await self._until(lambda: len(self.ends) == n)
        return [self.tokens.get(choice, []) for choice in range(n)], [self.ends[choice] for choice in range(n)]

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._changed.clear()
            await self._changed.wait()
