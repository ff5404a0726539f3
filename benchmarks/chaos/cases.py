"""The requests of a run: a pool of distinct cases, drawn from a seed, each of which has one right answer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

TOP = 20  # sampled cases draw among so many tokens, and the calm run's logprobs show all of them

_OPENINGS = (
    "The headrace leads the water onto the wheel, and",
    "In 1969, the first people on the moon",
    "def fibonacci(n):\n    ",
    "Die Hauptstadt von Frankreich ist",
    "Q: What is the boiling point of water?\nA:",
    "Once upon a time, in a village by the sea,",
    "List three uses of a brick:\n1.",
    "SELECT name, COUNT(*) FROM users",
    "My favourite recipe begins with",
    "Dear Sir or Madam,\n\nI am writing to",
    "人工知能の歴史は",
    "The three laws of thermodynamics say",
)
_FILLING = "A river that turns a wheel needs a weir, a race and a gate. "


@dataclass(frozen=True)
class Case:
    """A request whose tokens are determined: greedy, or sampled with a seed."""

    number: int
    path: str
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        return self.path.endswith("chat/completions")

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.body.get("logprobs"))

    @property
    def num_choices(self) -> int:
        return int(self.body.get("n", 1))


def draw_cases(seed: int, count: int) -> list[Case]:
    """The pool of a seed. Every kind is in it from some 20 cases on."""
    return [_draw(random.Random(f"case {seed} {number}"), number) for number in range(count)]


def _draw(chance: random.Random, number: int) -> Case:
    body: dict[str, Any] = {"max_tokens": chance.choice((24, 64, 128, 192)), **_sampling(chance), **_rules(chance)}
    if body["temperature"] and chance.random() < 0.5:  # greedy choices would all be the same one
        body["n"] = chance.choice((2, 3))
    # Different beginnings, so that not every prompt is in the prefix cache
    text = f"{number}. {_FILLING * chance.choice((0, 0, 2, 10))}{chance.choice(_OPENINGS)}"
    if chance.random() < 0.3:
        logprobs = {"logprobs": True, "top_logprobs": 2} if chance.random() < 0.3 else {}
        return Case(number, "/v1/chat/completions", {**body, **logprobs, "messages": [{"role": "user", "content": text}]})
    if chance.random() < 0.3:
        body["logprobs"] = 2
    return Case(number, "/v1/completions", {**body, "prompt": text})


def _sampling(chance: random.Random) -> dict[str, Any]:
    seed = chance.randrange(1 << 31)  # for greedy requests too: the null model's tokens depend on nothing else
    if chance.random() < 0.5:
        return {"temperature": 0.0, "seed": seed}
    return {"temperature": 0.9, "top_p": 0.95, "top_k": TOP, "seed": seed}


def _rules(chance: random.Random) -> dict[str, Any]:
    """What has to survive a failover beside the tokens: every third case has one of them."""
    choices: tuple[dict[str, Any], ...] = (
        {"stop": [". ", "\n\n"]},
        {"presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"min_tokens": 8},
        {"ignore_eos": True},
        {"bad_words": [" the"]},
        {"logit_bias": {"260": -5.0}},
        {"repetition_penalty": 1.2},
    )
    return chance.choice(choices) if chance.random() < 0.4 else {}
