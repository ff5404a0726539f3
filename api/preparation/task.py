"""A body after it has been read: what to ask of the engine, and how to turn output tokens into text."""

from __future__ import annotations

from dataclasses import dataclass, field

from api.model_files import ServedModel
from api.request.prompts import Prompt
from engine.protocol import SamplingParams


@dataclass(frozen=True)
class Task:
    """One request's prompts, each with `n` choices."""

    endpoint: str
    model: ServedModel
    prompts: list[Prompt]
    sampling: list[SamplingParams]  # one a prompt: max_tokens depends on what room the prompt leaves
    stop: list[str] = field(default_factory=list)
    include_stop: bool = False
    skip_special_tokens: bool = True
    echo: bool = False  # the prompt is part of the answer's text
    stream: bool = False
    priority: int = 0
    cache_salt: str = ""  # of the body; the engine's is derived from it and the tenant
    role: str = ""  # of a chat's answer
    answer_prefix: str = ""  # of a chat's answer: the message that it continues, where that is to be echoed

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
