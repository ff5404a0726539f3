"""A body after it has been read: what to ask of the engine, and how to turn output tokens into text."""

from __future__ import annotations

import msgspec

from api.model_files import ServedModel
from api.request.prompts import Prompt
from engine.protocol import AnswerOptions, SamplingParams


class Task(msgspec.Struct, frozen=True):
    """One request's prompts, each with `n` choices."""

    endpoint: str
    model: ServedModel
    prompts: list[Prompt]
    sampling: list[SamplingParams]  # one a prompt: max_tokens depends on what room the prompt leaves
    answer: AnswerOptions = AnswerOptions()
    stream: bool = False
    priority: int = 0
    tier: str = ""  # service tier that the body asks for; "": none
    cache_salt: str = ""  # of the body; the engine's is derived from it and the tenant
    kept_body: bytes = b""  # as in `RequestFacts`
    background: bool = False  # it goes on to its end without a client

    @property
    def n(self) -> int:
        return self.sampling[0].n

    @property
    def score_only(self) -> bool:
        """The prompt's logprobs are wanted, and nothing of what is generated."""
        return self.sampling[0].max_tokens == 0

    @property
    def num_choices(self) -> int:
        return self.n * len(self.prompts)
